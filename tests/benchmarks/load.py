"""Calls a server over HTTP from many connections at once, with requests that were made before."""

import asyncio
import itertools
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class Load:
    """What was measured."""

    seconds: float
    latencies_s: list[float]
    """Of each call."""
    n_tokens: int
    """Sampled, as the answers say."""

    @property
    def rate(self) -> float:
        """Calls a second."""
        return len(self.latencies_s) / self.seconds


def request(path: str, body: dict[str, Any], key: str = "none") -> bytes:
    """A request as it is sent."""
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}", "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def measured(port: int, conversations: Iterable[list[bytes]], at_once: int, expected: bytes) -> Load:
    """Has conversations, each call after the answer to the one before, ``at_once`` at any time.

    Args:
        expected: what every answer must hold.
    """
    return asyncio.run(_measured(port, iter(conversations), at_once, expected))


async def _measured(port: int, conversations: Iterable[list[bytes]], at_once: int, expected: bytes) -> Load:
    latencies: list[float] = []
    n_tokens = 0
    connections = [await asyncio.open_connection("127.0.0.1", port, limit=2**20) for _ in range(at_once)]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_tokens
        for asked in itertools.chain.from_iterable(conversations):
            began = time.perf_counter()
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            body = await reader.readexactly(length)
            latencies.append(time.perf_counter() - began)
            if not head.startswith(b"HTTP/1.1 200") or expected not in body:
                raise AssertionError(f"{head.decode()}{body.decode()}")
            told = _TOKENS.search(body)
            n_tokens += int(told[1]) if told else 0

    began = time.perf_counter()
    await asyncio.gather(*[talk(*connection) for connection in connections])
    seconds = time.perf_counter() - began
    for _, writer in connections:
        writer.close()
    return Load(seconds, latencies, n_tokens)
