"""The public face of Rollmill: what a user imports, and nothing else."""

from schemas.records import Action, Episode, EvalOutput, Signal, Step, Task, Trajectory
from stages.artifacts.scan import scan
from stages.artifacts.store import open_store
from stages.rewards.sdk import evaluator
from stages.rollouts.sdk import AgentConfig, rollout

__all__ = [
    "Action",
    "AgentConfig",
    "Episode",
    "EvalOutput",
    "Signal",
    "Step",
    "Task",
    "Trajectory",
    "evaluator",
    "open_store",
    "rollout",
    "scan",
]
