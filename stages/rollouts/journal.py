"""Model calls that outlive the stage: each is written to a local file as it ends.

Work that was interrupted is done again with the same ids and seeds, so its agents ask the same
questions; those that are in the journal are answered from it, token for token. What a killed stage
loses are the calls in flight. Files lie with the local copies and are removed when nobody needs them.
"""

import contextlib
import hashlib
import json
import os
import struct
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from stages.artifacts.cache import cache_root
from stages.artifacts.sweep import sweep_once
from stages.rollouts.engines.base import Engine, Generation, GenerationRequest, PolicyFiles, Retry
from stages.rollouts.frames import framed, frames

_BODY = struct.Struct("<16sI")
"""Key of the call and number of sampled ids."""
_KEY_FIELDS = tuple(field.name for field in fields(GenerationRequest) if field.compare and field.name != "prompt_ids")
_KEPT_S = 60.0
"""How long a shard's file is kept after its work was done: until then it is committed."""
_done: list[tuple[float, Path]] = []
_gate = threading.Lock()


class JournalEngine(Engine):
    """An engine whose answers are written down, and that knows those of the attempt before."""

    def __init__(self, engine: Engine, known: dict[bytes, Generation], file: int):
        super().__init__()
        self.name, self.logprob_mode, self.policy_id = engine.name, engine.logprob_mode, engine.policy_id
        self.takes_schemas = engine.takes_schemas
        self.n_replayed = 0
        """Calls that were answered from the journal."""
        self._engine = engine
        self._known = known
        self._file: int | None = file

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def broken(self) -> bool:
        return self._engine.broken

    async def generate(self, request: GenerationRequest) -> Generation:
        key = _key(request)
        if self._known and (known := self._known.get(key)) is not None:
            self.n_replayed += 1
            return known
        generation = await self._engine.generate(request)
        if self._file is not None:
            try:
                os.write(self._file, _record(key, generation))
            except OSError as error:
                self._file = None
                warnings.warn(f"finished model calls are not written down any more: {error}", stacklevel=2)
        return generation

    @contextlib.asynccontextmanager
    async def at_home(self) -> AsyncIterator[None]:
        async with self._engine.at_home():
            yield

    def _load(self, policy: PolicyFiles) -> None:
        self._engine.load(policy)

    def close(self) -> None:
        self._engine.close()


@contextlib.contextmanager
def journalled(engine: Engine, key: str, shard: str) -> Iterator[JournalEngine]:
    """The engine with the journal of one shard of the work called ``key``."""
    with journal_files(key, shard) as (old, file):
        known = {call: generation for path in old for call, generation in _read(path.read_bytes())}
        yield JournalEngine(engine, known, file)


@contextlib.contextmanager
def journal_files(key: str, shard: str) -> Iterator[tuple[list[Path], int]]:
    """The files of the attempts before at one shard of the work called ``key``, and a new one, open for writing."""
    folder = cache_root() / "journal" / key[:32]
    sweep_once(cache_root())
    _remove_done()
    folder.mkdir(parents=True, exist_ok=True)
    with _gate:  # what this process has finished is not asked for again, unless to be made anew for another store
        finished = {path for _, path in _done}
    old = [path for path in folder.glob(f"{shard}-*.calls") if path not in finished]
    path = folder / f"{shard}-{token_hex(8)}.calls"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    try:
        yield old, file
    finally:
        os.close(file)
    with _gate:
        _done.extend((time.monotonic(), file_path) for file_path in (*old, path))


def _remove_done() -> None:
    with _gate:
        until = time.monotonic() - _KEPT_S
        while _done and _done[0][0] < until:
            path = _done.pop(0)[1]
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # files of other shards
                path.parent.rmdir()


def _key(request: GenerationRequest) -> bytes:
    digest = hashlib.blake2b(request.prompt_ids.tobytes(), digest_size=16)
    digest.update(repr([getattr(request, name) for name in _KEY_FIELDS]).encode())
    return digest.digest()


def _record(key: bytes, generation: Generation) -> bytes:
    told = {
        "finish_reason": generation.finish_reason,
        "policy_id": generation.policy_id,
        "worker": generation.worker,
        "started_at": generation.started_at.isoformat(),
        "latency_s": generation.latency_s,
        "retries": [asdict(retry) | {"started_at": retry.started_at.isoformat()} for retry in generation.retries],
    }
    ids = np.asarray(generation.response_ids, dtype=np.int32)
    logprobs = np.asarray(generation.logprobs, dtype=np.float32)
    if len(ids) != len(logprobs) or not len(ids):
        return b""  # a fault, which its reader names; it is not worth keeping
    return framed(_BODY.pack(key, len(ids)) + ids.tobytes() + logprobs.tobytes() + json.dumps(told).encode())


def _read(content: bytes) -> Iterator[tuple[bytes, Generation]]:
    """The calls in a file, up to the first that is not whole."""
    for body in frames(content):
        key, n = _BODY.unpack_from(body)
        told = json.loads(body[_BODY.size + 8 * n :])
        yield (
            key,
            Generation(
                response_ids=np.frombuffer(body, dtype=np.int32, count=n, offset=_BODY.size),
                logprobs=np.frombuffer(body, dtype=np.float32, count=n, offset=_BODY.size + 4 * n),
                retries=tuple(Retry(**_with_time(retry)) for retry in told.pop("retries")),
                **_with_time(told),
            ),
        )


def _with_time(told: dict[str, Any]) -> dict[str, Any]:
    return told | {"started_at": datetime.fromisoformat(told["started_at"])}
