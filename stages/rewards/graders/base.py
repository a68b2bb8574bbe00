"""What a built-in grader is: a config model (its parameters) that can be called on a trajectory.

It runs in a worker process only. An exception becomes a status; a wrong or missing answer is a verdict.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from schemas.config import ConfigModel
from schemas.records import Episode, EvalOutput, Task, Trajectory
from stages.rewards.answers import NEEDS_FORMAT, Extraction, extracted

_CUT_SHORT = frozenset({"truncated", "max_turns", "timeout"})


class Grader(ConfigModel, ABC):
    """Scores one trajectory. Its fields are ``rewards.params`` and enter the key, as ``version`` does."""

    version: ClassVar[str]
    """Raised by hand when the same input would be scored otherwise."""
    needs_answer: ClassVar[bool] = True
    """Whether every task must have a reference answer."""

    def prepare(self) -> None:
        """Imports what is slow to import, before any time limit runs."""

    @abstractmethod
    def __call__(self, task: Task, episode: Episode, trajectory: Trajectory) -> EvalOutput | float | bool:
        """The trajectory's reward."""


class AnswerGrader(Grader):
    """Finds the answer in the last response and compares it with the task's: reward 1 if it matches, else 0."""

    of: Literal["response", "answers"] = "response"
    """What is compared: the trajectory's last response, or what the agent returned for the trajectory in its artifact
    ``answers`` (by name, null where it has none), as the patterns with roles do."""
    extract: Extraction = "text"
    """Where the answer is: the whole text, the last number, the rest of the line after the last ``marker``, inside the
    last box, or the last match of ``pattern``."""
    marker: str = Field(default="####", min_length=1)
    """For ``extract: marker``."""
    pattern: str | None = None
    """For ``extract: regex``: a regular expression; its first group is the answer where it has one."""

    @model_validator(mode="after")
    def _check_pattern(self) -> "AnswerGrader":
        import re

        if (self.extract == "regex") != (self.pattern is not None):
            raise ValueError("pattern goes with extract: regex, and extract: regex needs a pattern")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern is not a regular expression: {error}") from None
        return self

    @abstractmethod
    def matches(self, answer: str, reference: str) -> bool | None:
        """Whether ``answer`` equals ``reference``; None: ``answer`` is nothing that this grader can read.

        Raises:
            ValueError: for a reference that it cannot read.
        """

    def __call__(self, task: Task, episode: Episode, trajectory: Trajectory) -> EvalOutput:
        if task.answer is None:
            raise ValueError(f"task {task.id!r} has no reference answer")
        text = trajectory.response if self.of == "response" else _declared(episode, trajectory)
        text = text or ""
        answer = extracted(text, self.extract, marker=self.marker, pattern=self.pattern)
        matched = None if answer is None else self.matches(answer, task.answer)
        if matched:
            return EvalOutput(1.0, is_correct=True, verdict="correct")
        if _was_cut_short(episode, trajectory):
            verdict = "truncated"
        elif matched is False:
            verdict = "wrong_answer"
        else:
            verdict = "bad_format" if text.strip() and self.extract in NEEDS_FORMAT else "no_answer"
        return EvalOutput(0.0, is_correct=False, verdict=verdict, explanation=_explain(answer, task.answer))


def _declared(episode: Episode, trajectory: Trajectory) -> str | None:
    answers = episode.artifacts.get("answers")
    if episode.status in _CUT_SHORT and answers is None:
        return None  # the agent did not get as far
    if not isinstance(answers, Mapping) or trajectory.name not in answers:
        raise ValueError(f"the agent returned no artifact 'answers' with the trajectory {trajectory.name!r} in it")
    answer = answers[trajectory.name]
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"the answer of {trajectory.name!r} is a {type(answer).__name__}, and no text")
    return answer


def _was_cut_short(episode: Episode, trajectory: Trajectory) -> bool:
    ended_by_length = bool(trajectory.steps) and trajectory.steps[-1].finish_reason == "length"
    return ended_by_length or episode.status in _CUT_SHORT


def _explain(answer: str | None, reference: str) -> str | None:
    return None if answer is None else f"answered {_shown(answer)}, expected {_shown(reference)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else "…" + text[-79:])
