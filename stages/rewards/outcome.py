"""Turns what a grader returned or raised into one checked outcome a trajectory. Runs in the worker process.

Nothing is guessed here: a reward that is no finite number is a fault of the grader and never a score.
"""

import json
import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import PurePath
from typing import Any

from schemas.records import EvalOutput, Signal, Trajectory

_MAX_EXPLANATION = 2000


@dataclass
class Outcome:
    """One row of ``rewards`` with its signals and step rewards, in plain types that travel between processes."""

    trajectory: str
    status: str
    """ok, timeout, error or infra."""
    reward: float | None = None
    is_correct: bool | None = None
    verdict: str | None = None
    explanation: str | None = None
    signals: dict[str, float] = field(default_factory=dict)
    step_rewards: dict[int, float] = field(default_factory=dict)
    duration_s: float = 0.0


def outcome_of(returned: Any, trajectory: Trajectory) -> Outcome:
    """The outcome of a grader's return value: ``EvalOutput``, bool, number, or ``(reward, is_correct)``.

    A bool is a reward of 1 or 0; a bare number says nothing about right or wrong, so ``is_correct`` stays null.
    """
    try:
        output = _as_output(returned)
        is_correct = None if output.is_correct is None else bool(output.is_correct)
        verdict = output.verdict
        if verdict is None and is_correct is not None:
            verdict = "correct" if is_correct else "wrong_answer"
        return Outcome(
            trajectory.name,
            "ok",
            reward=_finite(output.reward, "the reward"),
            is_correct=is_correct,
            verdict=None if verdict is None else clean(str(verdict)),
            explanation=_explanation(output),
            signals=_signals(output.signals),
            step_rewards=_step_rewards(output.step_rewards, len(trajectory.steps)),
        )
    except (TypeError, ValueError) as error:
        return Outcome(trajectory.name, "error", explanation=clean(f"the grader returned {error}"))


def fault_of(error: BaseException, trajectory: Trajectory) -> Outcome:
    """The outcome of an exception: the message and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({PurePath(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return Outcome(trajectory.name, "error", explanation=clean(f"{type(error).__name__}: {error}{where}"))


def clean(text: str) -> str:
    """``text`` as valid UTF-8 of bounded length."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_EXPLANATION else text[:_MAX_EXPLANATION] + "…"


def _as_output(returned: Any) -> EvalOutput:
    if isinstance(returned, EvalOutput):
        return returned
    if isinstance(returned, bool) or type(returned).__name__ == "bool_":
        return EvalOutput(float(returned), is_correct=bool(returned))
    if isinstance(returned, tuple) and len(returned) == 2:
        return EvalOutput(returned[0], is_correct=returned[1])
    return EvalOutput(returned)


def _explanation(output: EvalOutput) -> str | None:
    if output.explanation is not None:
        return clean(str(output.explanation))
    return clean(json.dumps(output.metadata, default=str, sort_keys=True)) if output.metadata else None


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, Real) and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{type(value).__name__} as {what}; expected a number, a bool or an EvalOutput")
    if not math.isfinite(value):
        raise ValueError(f"{float(value)} as {what}")
    return float(value)


def _signals(signals: Any) -> dict[str, float]:
    pairs = (
        signals.items()
        if isinstance(signals, Mapping)
        else [(s.name, s.value) for s in signals if isinstance(s, Signal)]
    )
    checked = {clean(str(name)): _finite(value, f"the signal {name!r}") for name, value in pairs}
    if len(checked) != len(signals):
        raise ValueError("signals that are no Signal, or two of one name")
    return checked


def _step_rewards(step_rewards: Mapping[int, Any], n_steps: int) -> dict[int, float]:
    for index in step_rewards:
        if not isinstance(index, int) or not 0 <= index < n_steps:
            raise ValueError(f"a reward for step {index!r} of a trajectory with {n_steps} steps")
    return {index: _finite(value, f"the reward of step {index}") for index, value in step_rewards.items()}
