"""Answered calls of an endpoint that outlive the stage: what was paid for once is not asked for again."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from schemas.canonical import canonical_json
from stages.rollouts.endpoints.answers import Answer
from stages.rollouts.endpoints.client import Asked, Endpoint


class JournalEndpoint:
    """An endpoint whose answers are written down, and that knows those of the attempt before."""

    def __init__(self, endpoint: Endpoint, old: Iterable[Path], file: int):
        self._endpoint = endpoint
        self._known = {key: asked for path in old for key, asked in _read(path.read_bytes())}
        self._file: int | None = file

    async def ask(
        self, call_id: Any, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Answer]
    ) -> Asked:
        """Answers a call.

        Args:
            call_id: tells it from other calls with the same body.
        """
        key = hashlib.blake2b(canonical_json([call_id, path, body]).encode(), digest_size=16).hexdigest()
        if (known := self._known.get(key)) is not None:
            return known
        asked = await self._endpoint.ask(path, body, read)
        if self._file is not None:
            try:
                os.write(self._file, _line(key, asked))
            except OSError as error:
                self._file = None
                warnings.warn(f"finished model calls are not written down any more: {error}", stacklevel=2)
        return asked


def _line(key: str, asked: Asked) -> bytes:
    told = {"told": asked.told, "started_at": asked.started_at.isoformat(), "latency_s": asked.latency_s}
    return json.dumps({"key": key, **told}).encode() + b"\n"


def _read(content: bytes) -> Iterator[tuple[str, Asked]]:
    """The calls in a file; a last one that is not whole is left out."""
    for line in content.splitlines(keepends=True):
        if line.endswith(b"\n"):
            found = json.loads(line)
            yield (
                found["key"],
                Asked(found["told"], datetime.fromisoformat(found["started_at"]), found["latency_s"]),
            )
