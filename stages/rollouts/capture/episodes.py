"""Captured sessions as episodes, and the tasks that they attempted."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from schemas.canonical import canonical_hash, canonical_json
from schemas.records import Task
from stages.rollouts.capture.log import Captured, CapturedCall, read_session
from stages.rollouts.episodes import Attempt, CallError, EpisodeRecord
from stages.rollouts.sdk import Agent, AgentConfig, MaxTurnsReached, Messages
from stages.rollouts.session import RecordedStep
from stages.rollouts.sources import AnyStep

SUFFIX = ".calls"
_AGENT = "gateway"
_KILLED = "GatewayKilled"


def read_folder(folder: Path) -> list[Captured]:
    """The sessions of a folder in which something has happened, in the order in which they began."""
    found = [captured for path in folder.glob(f"*{SUFFIX}") if (captured := read_session(path)) is not None]
    worth = [one for one in found if one.calls or one.errors or one.head.task is not None]
    return sorted(worth, key=lambda one: (one.head.created_at, one.head.episode_id))


def tasks_of(sessions: Sequence[Captured]) -> list[Task]:
    """Each task once: as a session has described it, else after the first prompt of one that has attempted it."""
    found: dict[str, Task] = {}
    said: set[str] = set()
    for session in sessions:
        task, is_described = _task(session)
        if task.id not in found or (is_described and task.id not in said):
            found[task.id] = task
        if is_described:
            said.add(task.id)
    return sorted(found.values(), key=lambda task: task.id)


def episodes_of(sessions: Sequence[Captured], chosen: set[str]) -> list[EpisodeRecord]:
    """The episodes of the chosen sessions (by episode id).

    Args:
        sessions: all that are committed together, in order: they number the attempts at each task.
    """
    seen: Counter[str] = Counter()
    made = []
    for session in sessions:
        task, _ = _task(session)
        if session.head.episode_id in chosen:
            made.append(_episode(session, task, seen[task.id]))
        seen[task.id] += 1
    return made


def _task(session: Captured) -> tuple[Task, bool]:
    """What a session attempted, and whether that was described and is not only known by what it has asked."""
    told = session.head.task or {}
    instruction = told.get("instruction")
    is_described = instruction is not None
    if instruction is None:
        instruction = _first_prompt(session)
    task_id = told.get("id") or f"prompt-{canonical_hash([instruction, told.get('answer')])[:24]}"
    return Task(task_id, instruction, told.get("answer"), told.get("metadata") or {}), is_described


def _first_prompt(session: Captured) -> str | list[dict[str, Any]]:
    """What the user said first; all messages as text where that was nobody."""
    messages = session.calls[0].messages if session.calls else []
    for message in messages:
        if message.get("role") == "user" and message.get("content"):
            content: str | list[dict[str, Any]] = message["content"]
            return content
    return canonical_json(messages) if messages else ""


def _episode(session: Captured, task: Task, rollout_index: int) -> EpisodeRecord:
    status, error_kind, error = _outcome(session)
    head = session.head
    attempt = Attempt(head.episode_id, task, rollout_index, head.seed, _AGENT, Agent(_elsewhere, head.role))
    return EpisodeRecord(
        attempt=attempt,
        status=status,
        error_kind=error_kind,
        error=error,
        artifacts=_artifacts(session),
        started_at=head.created_at,
        duration_s=(_ended_at(session) - head.created_at).total_seconds(),
        steps=_steps(session),
        call_errors=sorted(
            (
                CallError(one.trajectory, one.started_at, one.status, one.kind, one.message, one.partial)
                for one in session.errors
            ),
            key=lambda one: (one.trajectory, one.started_at),
        ),
    )


def _elsewhere(task: Task, config: AgentConfig) -> None:
    """The program that made the calls; it ran elsewhere."""
    raise NotImplementedError


def _outcome(session: Captured) -> tuple[str, str | None, str | None]:
    """Status, kind and message."""
    if session.end is not None and session.end.error is not None:
        return "error", "AgentError", session.end.error
    if session.end is None:
        return "timeout", _KILLED, "the gateway was killed before the session had ended"
    if any(one.kind == MaxTurnsReached.__name__ for one in session.errors):
        return "max_turns", None, None
    is_cut = session.calls and session.calls[-1].generation.finish_reason == "length"
    return "truncated" if is_cut else "completed", None, None


def _artifacts(session: Captured) -> str | None:
    told = dict(session.end.artifacts or {}) if session.end is not None else {}
    if session.head.metadata:
        told = {"metadata": session.head.metadata, **told}
    return canonical_json(told) if told else None


def _ended_at(session: Captured) -> datetime:
    if session.end is not None:
        return session.end.at
    ends = [call.generation.started_at + timedelta(seconds=call.generation.latency_s) for call in session.calls] + [
        error.started_at for error in session.errors
    ]
    return max(ends, default=session.head.created_at)


def _steps(session: Captured) -> list[AnyStep]:
    steps: list[AnyStep] = []
    for trajectory in sorted({call.trajectory for call in session.calls}):
        before: CapturedCall | None = None
        for call in session.calls:
            if call.trajectory == trajectory:
                n = sum(step.trajectory == trajectory for step in steps)
                steps.append(_step(call, before, n))
                before = call
    return steps


def _step(call: CapturedCall, before: CapturedCall | None, step_index: int) -> RecordedStep:
    return RecordedStep(
        trajectory=call.trajectory,
        step_index=step_index,
        messages=_new_messages(call, before),
        response=call.content,
        reasoning=call.reasoning,
        tool_calls=call.tool_calls,
        prefix_length=call.prefix_length,
        prompt_ids=call.prompt_ids[call.prefix_length :],
        prompt_tokens=len(call.prompt_ids),
        generation=call.generation,
        sampling=call.sampling,
        seed=call.seed,
    )


def _new_messages(call: CapturedCall, before: CapturedCall | None) -> Messages:
    """Those after the call before and its answer; all, where this one does not continue it."""
    if before is None or call.prefix_length < len(before.prompt_ids) + len(before.generation.response_ids):
        return call.messages
    n = len(before.messages)
    continues = call.messages[:n] == before.messages and call.messages[n : n + 1]
    return call.messages[n + 1 :] if continues and call.messages[n].get("role") == "assistant" else call.messages
