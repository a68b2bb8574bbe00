"""The grader ``agent``: the reward and the signals that the agent itself gave the trajectory, as environments do."""

from typing import ClassVar

from schemas.records import Episode, EvalOutput, Task, Trajectory
from stages.rewards.graders.base import Grader


class Agent(Grader):
    """Hands on what was recorded; a trajectory without a reward is a failure and never 0."""

    version: ClassVar[str] = "1"
    needs_answer: ClassVar[bool] = False

    correct_at: float | None = None
    """Reward from which on a trajectory is correct. None: one whose signal ``solved`` is not 0, as environments give;
    without that signal nothing is said of right and wrong."""

    def __call__(self, task: Task, episode: Episode, trajectory: Trajectory) -> EvalOutput:
        if trajectory.reward is None:
            raise ValueError(f"the agent gave the trajectory {trajectory.name!r} no reward (status {episode.status})")
        solved = trajectory.signals.get("solved")
        is_correct = None if solved is None else bool(solved)
        if self.correct_at is not None:
            is_correct = trajectory.reward >= self.correct_at
        return EvalOutput(trajectory.reward, is_correct, signals=trajectory.signals)
