"""The records that agents and graders handle: ``Task``, ``Episode``, ``Trajectory``, ``Step``.

Their public names follow rLLM, so that an agent written for it needs another import line only.
The stored form of each is the table of the same name in ``schemas.tables``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Task:
    """One thing to do. ``id`` is stable and opaque."""

    id: str
    instruction: str | list[dict[str, Any]]
    """Text, or a list of content parts as in the chat API."""
    answer: str | None = None
    """The reference answer; None: there is none."""
    metadata: dict[str, Any] = field(default_factory=dict)
    benchmark: str | None = None
    split: str | None = None
    grader: str | None = None
    agent: str | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Task":
        """The task in one row of the ``tasks`` table."""
        values = {name: row[name] for name in ("answer", "benchmark", "split", "grader", "agent")}
        metadata = {} if row["metadata"] is None else json.loads(row["metadata"])
        return cls(id=row["task_id"], instruction=instruction_from(row["instruction"]), metadata=metadata, **values)


@dataclass
class Action:
    """What an agent did after a model call, in the agent's own form."""

    action: Any = None


@dataclass
class Step:
    """One model call."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages new since the previous step of the trajectory."""
    response: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    prefix_length: int | None = None
    """Leading ids of the sequence so far that the prompt keeps; None: ids are not known."""
    prompt_ids: Any = None
    """int32 array, the prompt's ids after ``prefix_length``; None: not known."""
    response_ids: Any = None
    """int32 array, the sampled ids, stop token included; None: not known."""
    logprobs: Any = None
    """float32 array, one natural-log probability a sampled id; None: not known."""
    reward: float | None = None
    """None: not graded."""
    id: str = ""
    input: Any = None
    output: Any = None
    action: Any = None
    """What the agent made of the answer: an ``Action`` or anything else."""
    done: bool = False
    metadata: dict[str, Any] | None = None
    """These last six are an agent's own notes; what is stored of a step is the recorded call."""


@dataclass
class Trajectory:
    """The steps of one role inside an episode."""

    name: str = "default"
    steps: list[Step] = field(default_factory=list)
    reward: float | None = None
    """None: not graded."""
    signals: dict[str, float] = field(default_factory=dict)
    uid: str = ""
    task: Any = None
    input: Any = None
    output: Any = None
    """What this role made; kept with the episode's artifacts where an agent gives it."""
    metadata: dict[str, Any] | None = None

    @property
    def response(self) -> str | None:
        """Text of the last step; None where there is no step or it has no text."""
        return self.steps[-1].response if self.steps else None


@dataclass
class Episode:
    """One attempt at a task: its trajectories and what the agent returned."""

    id: str = ""
    """Given by the rollouts stage; empty in an agent's own return value."""
    task: Task | None = None
    trajectories: list[Trajectory] = field(default_factory=list)
    artifacts: dict[str, Any] = field(default_factory=dict)
    status: str = "completed"
    """completed, truncated, max_turns, timeout or error."""
    metrics: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    is_correct: bool | None = None
    """What the agent itself thinks, for its artifacts; graders decide."""

    @property
    def response(self) -> str | None:
        """Text of the last step of the last trajectory; None where there is none."""
        return self.trajectories[-1].response if self.trajectories else None


@dataclass
class Signal:
    """A named number that a grader gives beside the reward."""

    name: str
    value: float


@dataclass(frozen=True)
class EvalOutput:
    """What a grader says of one trajectory."""

    reward: float
    is_correct: bool | None = None
    """None: the grader does not judge that."""
    verdict: str | None = None
    """correct, wrong_answer, no_answer, truncated, bad_format, …"""
    explanation: str | None = None
    signals: dict[str, float] | list[Signal] = field(default_factory=dict)
    step_rewards: dict[int, float] = field(default_factory=dict)
    """Reward by step index, where the grader gives them."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Told as the explanation, where the grader gives none."""


def instruction_from(column: str) -> str | list[dict[str, Any]]:
    """What an ``instruction`` column holds: content parts where it is a JSON list of them, else its own text."""
    if column.startswith('[{"'):
        try:
            parts = json.loads(column)
        except json.JSONDecodeError:
            return column
        if all(isinstance(part, dict) and "type" in part for part in parts):
            return parts
    return column
