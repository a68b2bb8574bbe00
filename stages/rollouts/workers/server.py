"""Speaks to one vLLM server over HTTP."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

_SHORT_S = 30.0
"""For what a server answers from memory."""
_LONG_S = 600.0
"""For what it has to work for: new weights, a probe, the first call of all."""
_MESSAGE_LIMIT = 500


class ServerFault(Exception):
    """The server did not answer, or answered that it cannot."""

    def __init__(self, message: str, *, status: int | None = None, is_refused: bool = False):
        super().__init__(message)
        self.status = status
        """Of HTTP; None: there was no answer."""
        self.is_refused = is_refused
        """Nobody listens there."""


@dataclass(frozen=True)
class Model:
    """What a server says that it serves."""

    name: str
    context_length: int | None
    is_adapter: bool


@dataclass(frozen=True)
class Load:
    """What a server says of its work."""

    running: int
    waiting: int
    progress: float
    """Tokens read and written since it started; grows while it works."""


class Connections:
    """HTTP connections to servers; each event loop that is to ask them opens its own."""

    def __init__(self) -> None:
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    @property
    def are_open(self) -> bool:
        """Whether the running event loop has some."""
        return asyncio.get_running_loop() in self._sessions

    @property
    def here(self) -> aiohttp.ClientSession:
        """Those of the running event loop."""
        return self._sessions[asyncio.get_running_loop()]

    def open(self) -> None:
        """Opens them for the running event loop."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._sessions[asyncio.get_running_loop()] = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        """Closes those of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


class Server:
    """A vLLM server at a URL."""

    def __init__(self, url: str, connections: Connections, api_key: str | None = None):
        self._url = url.rstrip("/")
        parts = urlsplit(url)
        self.place = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
        """Host and port; a URL may hold a password."""
        self._connections = connections
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def version(self) -> str:
        return str((await self._json("GET", "/version")).get("version", "unknown"))

    async def models(self) -> list[Model]:
        listed = (await self._json("GET", "/v1/models")).get("data", [])
        try:
            return [Model(str(one["id"]), one.get("max_model_len"), bool(one.get("parent"))) for one in listed]
        except (TypeError, KeyError, AttributeError) as error:
            raise ServerFault(f"{self.place}/v1/models did not answer with a list of models") from error

    async def check_health(self, timeout_s: float) -> None:
        """Raises ServerFault unless it says that it is well."""
        await self._ask("GET", "/health", None, timeout_s)

    async def load(self, timeout_s: float) -> Load:
        text = (await self._ask("GET", "/metrics", None, timeout_s)).decode(errors="replace")
        return Load(
            running=int(_sum(text, "num_requests_running")),
            waiting=int(_sum(text, "num_requests_waiting")),
            progress=_sum(text, "generation_tokens_total") + _sum(text, "prompt_tokens_total"),
        )

    async def complete(self, path: str, body: dict[str, Any], timeout_s: float = _LONG_S) -> bytes:
        return await self._ask("POST", path, body, timeout_s)

    async def stream(self, path: str, body: dict[str, Any], timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The same while it is sampled: the data of each event, or of the one answer of a server that does not stream.
        Its end, early or not, ends the sampling."""
        async with self._answer("POST", path, body, timeout_s) as response:
            if response.content_type == "application/json":
                yield await response.read()
                return
            rest = b""
            async for some in response.content.iter_any():
                *lines, rest = (rest + some).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield data

    async def load_adapter(self, name: str, folder: str) -> None:
        """Loads a LoRA adapter that the server finds in ``folder``."""
        await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, _LONG_S)

    async def unload_adapter(self, name: str) -> None:
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, _SHORT_S)

    async def reset_prefix_cache(self) -> bool | None:
        """Whether it is empty now; None: this server does not offer it."""
        try:
            answer = await self._json("POST", "/reset_prefix_cache")
        except ServerFault as fault:
            if fault.status == 404:
                return None
            raise
        return bool(answer.get("success", True))

    async def call_workers(self, method: str, **arguments: str) -> None:
        """Calls a method of the model's own processes."""
        await self._ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments}, _LONG_S)

    async def _json(self, method: str, path: str) -> dict[str, Any]:
        try:
            found = orjson.loads(await self._ask(method, path, None, _SHORT_S) or b"{}")
        except ValueError as error:
            raise ServerFault(f"{self.place}{path} did not answer in JSON") from error
        return found if isinstance(found, dict) else {}

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> bytes:
        async with self._answer(method, path, body, timeout_s) as response:
            return await response.read()

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_SHORT_S, timeout_s))
        try:
            async with self._connections.here.request(
                method, self._url + path, data=data, timeout=limits, headers=self._headers
            ) as response:
                if response.status >= 400:
                    told = (await response.read()).decode(errors="replace")[:_MESSAGE_LIMIT]
                    raise ServerFault(f"{self.place}{path} answered {response.status}: {told}", status=response.status)
                yield response
        except TimeoutError as error:
            raise ServerFault(f"{self.place}{path} has not answered within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise ServerFault(f"{self.place} cannot be reached: {error.os_error}", is_refused=True) from error
        except aiohttp.ClientError as error:
            raise ServerFault(f"{self.place}{path} broke off: {error or type(error).__name__}") from error


def _sum(text: str, name: str) -> float:
    """Of a metric, over the engines behind a server."""
    return sum(map(float, re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)))
