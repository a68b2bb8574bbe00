"""The public face of Rollmill: what a user imports, and nothing else."""

from schemas.records import Episode, EvalOutput, Step, Task, Trajectory
from stages.artifacts.scan import scan
from stages.artifacts.store import open_store

__all__ = ["Episode", "EvalOutput", "Step", "Task", "Trajectory", "open_store", "scan"]
