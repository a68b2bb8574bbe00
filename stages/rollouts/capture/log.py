"""One session's file: what it is, each of its calls as it ended, and how it ended.

A call holds what is new since the call of its trajectory that stands before it, so a file grows with new messages and
ids only. It is written in one piece when the call has ended: a kill loses the calls in flight and nothing else.
"""

import json
import os
import struct
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from schemas.errors import StageFailed
from stages.rollouts.calls import ModelAnswer, ModelCall, ToolCall
from stages.rollouts.engines.base import Generation, GenerationRequest, SamplingParams
from stages.rollouts.engines.progress import Partial
from stages.rollouts.frames import framed, frames
from stages.rollouts.sdk import Messages
from stages.rollouts.sequence import common_prefix

Form = Literal["chat", "text", "ids"]
_SIZE = struct.Struct("<I")


class NotCaptured(StageFailed):
    """What was sampled could not be written down, so its caller does not get it either."""


@dataclass(frozen=True)
class Head:
    """What a session is."""

    session: str
    """Its name at the gateway; another session may have it later."""
    episode_id: str
    role: str
    """Name of the trajectory of calls that name none."""
    seed: int
    created_at: datetime
    task: dict[str, Any] | None = None
    """``id``, ``instruction``, ``answer`` and ``metadata``, as far as they were given. None: nobody has said."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The client's own notes."""


@dataclass(frozen=True)
class CapturedCall:
    """A call that was answered."""

    trajectory: str
    messages: Messages
    """All of the prompt."""
    form: Form
    """How the prompt was given: as a chat, which a template renders, or as a text or ids of the client's own."""
    tools: list[dict[str, Any]] | None
    stop: tuple[str, ...]
    prefix_length: int
    """Leading ids of the sequence of the call before that the prompt keeps."""
    prompt_ids: np.ndarray
    """All of them."""
    generation: Generation
    sampling: SamplingParams
    seed: int
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and answer."""
        return np.concatenate([self.prompt_ids, self.generation.response_ids])


@dataclass(frozen=True)
class FailedCall:
    """A call that was not answered, or not at once."""

    trajectory: str
    started_at: datetime
    status: str
    kind: str
    message: str
    partial: Partial | None = None
    """What had been asked and sampled; None: nothing was asked, or that is not known."""


@dataclass(frozen=True)
class End:
    """How a session ended."""

    at: datetime
    error: str | None = None
    artifacts: dict[str, Any] | None = None
    """What the client had to say of it."""


@dataclass
class Captured:
    """A session as its file has it."""

    head: Head
    calls: list[CapturedCall] = field(default_factory=list)
    errors: list[FailedCall] = field(default_factory=list)
    end: End | None = None


class SessionLog:
    """Writes a session's file. Not open between two records: there may be more sessions than a process has files."""

    def __init__(self, path: Path, known: Captured | None = None):
        """
        Args:
            known: what is in the file already, where it goes on.
        """
        self.path = path
        self._last: dict[str, CapturedCall] = {}
        for call in known.calls if known else []:
            self._last[call.trajectory] = call

    def begin(self, head: Head) -> None:
        self._write("session", _plain(asdict(head)), create=True)

    def call(
        self, trajectory: str, call: ModelCall, messages: Messages, asked: GenerationRequest, generation: Generation,
        answer: ModelAnswer,
    ) -> None:  # fmt: skip
        """Notes an answered call.

        Args:
            messages: all of the prompt, also where it was given as text or ids.
        """
        before = self._last.get(trajectory)
        kept_messages = _common(before.messages, messages) if before else 0
        prefix = common_prefix(before.sequence, asked.prompt_ids) if before else 0
        known_tools = before is not None and before.tools == call.tools
        form: Form = "chat" if call.prompt is None else "text" if isinstance(call.prompt, str) else "ids"
        now = CapturedCall(
            trajectory, messages, form, call.tools, call.stop, prefix, asked.prompt_ids, generation,
            asked.sampling, asked.seed, answer.content, answer.reasoning, answer.tool_calls,
        )  # fmt: skip
        added = asked.prompt_ids[prefix:]
        told = {
            "trajectory": trajectory,
            "kept_messages": kept_messages,
            "messages": messages[kept_messages:],
            "form": form,
            "keeps_tools": known_tools,
            "tools": None if known_tools else call.tools,
            "stop": call.stop,
            "prefix_length": prefix,
            "n_added": len(added),
            "n_sampled": len(generation.response_ids),
            "finish_reason": generation.finish_reason,
            "policy_id": generation.policy_id,
            "worker": generation.worker,
            "started_at": generation.started_at.isoformat(),
            "latency_s": generation.latency_s,
            "sampling": asdict(asked.sampling),
            "seed": asked.seed,
            "content": answer.content,
            "reasoning": answer.reasoning,
            "tool_calls": [asdict(one) for one in answer.tool_calls],
        }
        self._write("call", told, added, generation.response_ids, generation.logprobs)
        self._last[trajectory] = now

    def failed(self, error: FailedCall) -> None:
        partial, arrays = error.partial, []
        told = _plain(asdict(replace(error, partial=None)))
        if partial is not None:
            arrays = [one for one in (partial.prompt_ids, partial.response_ids, partial.logprobs) if one is not None]
            n_sampled = None if partial.response_ids is None else len(partial.response_ids)
            told["partial"] = {
                "policy_id": partial.policy_id,
                "n_prompt": len(partial.prompt_ids),
                "n_sampled": n_sampled,
            }
        self._write("error", told, *arrays)

    def end(self, end: End) -> None:
        self._write("end", _plain(asdict(end)))

    def _write(self, kind: str, told: dict[str, Any], *arrays: np.ndarray, create: bool = False) -> None:
        text = json.dumps({"record": kind, **told}).encode()
        types = (np.int32, np.int32, np.float32)
        body = b"".join(np.asarray(array, dtype).tobytes() for array, dtype in zip(arrays, types, strict=False))
        record = framed(_SIZE.pack(len(text)) + text + body)
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            file = os.open(self.path, flags, 0o600)
            try:
                size = os.fstat(file).st_size
                if os.write(file, record) < len(record):  # the disk is full
                    os.ftruncate(file, size)
                    raise OSError("it was not written whole")
            finally:
                os.close(file)
        except OSError as error:
            raise NotCaptured(f"a {kind} could not be written to {self.path}: {error}") from error


def read_session(path: Path) -> Captured | None:
    """What a file holds; None: it was cut before it said which session it is."""
    found: Captured | None = None
    last: dict[str, CapturedCall] = {}
    for body in frames(path.read_bytes()):
        told, rest = _taken_apart(body)
        kind = told.pop("record")
        if found is None:
            found = Captured(Head(**{**told, "created_at": datetime.fromisoformat(told["created_at"])}))
        elif kind == "call":
            call = _call(told, rest, last.get(told["trajectory"]))
            last[call.trajectory] = call
            found.calls.append(call)
        elif kind == "error":
            found.errors.append(_failed(told, rest))
        else:
            found.end = End(**{**told, "at": datetime.fromisoformat(told["at"])})
    return found


def cut_to_whole_records(path: Path) -> None:
    """Removes the end of a record that a kill has left, so that others can stand after those that are whole."""
    whole = sum(len(framed(body)) for body in frames(path.read_bytes()))
    os.truncate(path, whole)


def _taken_apart(body: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = _SIZE.unpack_from(body)
    return json.loads(body[_SIZE.size : _SIZE.size + size]), body[_SIZE.size + size :]


def _call(told: dict[str, Any], arrays: bytes, before: CapturedCall | None) -> CapturedCall:
    n_added, n_sampled, prefix, kept = (
        told[name] for name in ("n_added", "n_sampled", "prefix_length", "kept_messages")
    )
    added = np.frombuffer(arrays, np.int32, n_added)
    generation = Generation(
        response_ids=np.frombuffer(arrays, np.int32, n_sampled, 4 * n_added),
        logprobs=np.frombuffer(arrays, np.float32, n_sampled, 4 * (n_added + n_sampled)),
        started_at=datetime.fromisoformat(told["started_at"]),
        **{name: told[name] for name in ("finish_reason", "policy_id", "worker", "latency_s")},
    )
    sampling = told["sampling"]
    lists = {name: tuple(sampling[name]) for name in ("stop_token_ids", "stop_texts")}
    return CapturedCall(
        trajectory=told["trajectory"],
        messages=[*(before.messages[:kept] if before else []), *told["messages"]],
        form=told["form"],
        tools=before.tools if told["keeps_tools"] and before else told["tools"],
        stop=tuple(told["stop"]),
        prefix_length=prefix,
        prompt_ids=np.concatenate([before.sequence[:prefix], added]) if before else added,
        generation=generation,
        sampling=SamplingParams(**{**sampling, **lists}),
        seed=told["seed"],
        content=told["content"],
        reasoning=told["reasoning"],
        tool_calls=tuple(ToolCall(**one) for one in told["tool_calls"]),
    )


def _failed(told: dict[str, Any], arrays: bytes) -> FailedCall:
    known = told.pop("partial", None)
    partial = None
    if known is not None:
        n_prompt, n = known["n_prompt"], known["n_sampled"]
        partial = Partial(
            known["policy_id"],
            np.frombuffer(arrays, np.int32, n_prompt),
            None if n is None else np.frombuffer(arrays, np.int32, n, 4 * n_prompt),
            None if n is None else np.frombuffer(arrays, np.float32, n, 4 * (n_prompt + n)),
        )
    return FailedCall(**{**told, "started_at": datetime.fromisoformat(told["started_at"]), "partial": partial})


def _common(before: Messages, messages: Messages) -> int:
    """How many leading messages are the same."""
    pairs = enumerate(zip(before, messages, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(before), len(messages)))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}
