"""What a grader's author imports: the ``evaluator`` decorator and the records that a grader sees and returns.

Names follow rLLM. Light to import: a worker process loads a user's file and this, and nothing of the pipeline.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, overload

from schemas.records import Episode, EvalOutput, Signal, Step, Task, Trajectory

__all__ = ["Episode", "EvalOutput", "Evaluator", "Signal", "Step", "Task", "Trajectory", "evaluator"]

GraderFunction = Callable[..., Any]


class Evaluator:
    """A function marked as a grader; calling it calls the function."""

    def __init__(self, function: GraderFunction, version: str | None = None):
        self.function = function
        self.version = version
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@overload
def evaluator(function: GraderFunction) -> Evaluator: ...


@overload
def evaluator(*, version: str | None = None) -> Callable[[GraderFunction], Evaluator]: ...


def evaluator(
    function: GraderFunction | None = None, *, version: str | None = None
) -> Evaluator | Callable[[GraderFunction], Evaluator]:
    """Marks a function as a grader: ``(task, episode)`` or ``(task, episode, trajectory)``, plain or async.

    With ``(task, episode)`` it is called once an episode and its verdict holds for each trajectory; with three
    arguments it is called once a trajectory. Further keyword arguments are given by ``rewards.params``.

    It returns the reward as a number, a bool (right or wrong), ``(reward, is_correct)`` or an ``EvalOutput``; with
    ``(task, episode)`` also a dict of these by trajectory name. An exception is a status and never a reward.

    Args:
        version: a string literal that its author raises when the same input would be scored otherwise; None: the
            hash of the source file, so that any edit scores anew.
    """
    if function is not None:
        return Evaluator(function)
    return lambda decorated: Evaluator(decorated, version)
