"""Asks an endpoint over HTTP: with its key, no faster than it may, and again where that can help.

One thread with an event loop of its own asks for all shards of the process, so that the limits hold for them together.
The key is taken out of everything that is read before anyone else sees it.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from schemas.canonical import canonical_hash
from schemas.errors import RollmillError
from stages.rollouts.endpoints.answers import Answer, Nonsense
from stages.rollouts.endpoints.pacing import Pace, retry_after
from stages.rollouts.endpoints.settings import EndpointConfig, EndpointExecution, key_of
from stages.rollouts.engines.base import EngineFault
from stages.rollouts.masking import MASK, SHORTEST, Masker

_CONNECT_S = 10.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_SHOWN = 300
"""Characters of what it said that a message repeats."""
_AGAIN = (408, 409, 425, 429)
_THIS_CALL = (400, 413, 422)
"""It is this call that cannot be answered; another one may be."""
_NO_MODEL = ("model_not_found", "unknown_model", "invalid_model")


class CallRefused(RollmillError):
    """The endpoint does not answer this call."""


@dataclass(frozen=True)
class Asked:
    """A call with its answer."""

    told: dict[str, Any]
    """The answer's JSON."""
    started_at: datetime
    """When the try that was answered was sent, UTC."""
    latency_s: float


class _Failed(Exception):
    """A try that may go better again.

    Args:
        wait_s: that the endpoint asks for; None: nothing.
        too_often: whether it only says that it is asked too often.
    """

    def __init__(self, what: str, wait_s: float | None = None, *, too_often: bool = False):
        super().__init__(what)
        self.what, self.wait_s, self.too_often = what, wait_s, too_often


class Endpoint:
    """A model at an address. ``ask`` may be called from several event loops at once."""

    def __init__(self, config: EndpointConfig, execution: EndpointExecution):
        self.config = config
        self.place = urlsplit(config.base_url).netloc
        self._execution = execution
        self._key = key_of(execution)
        self.mask = Masker([self._key or ""])
        self._session: aiohttp.ClientSession | None = None
        self._pace = Pace(execution.requests_per_minute)
        self._slots = asyncio.Semaphore(execution.max_concurrency)
        self._n_answered = 0
        self._first_refusal: CallRefused | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollmill-endpoint", daemon=True)
        self._thread.start()

    async def ask(self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Answer]) -> Asked:
        """Asks, and again where the endpoint fails, is asked too often, or answers what ``read`` takes for nonsense.

        Raises:
            CallRefused: it does not answer this call.
            EngineFault: it answers none, and why.
        """
        work = self._asked(path, body, read)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def check_it_answers(self) -> None:
        """Raises EngineFault where every single call was refused: then it is not the calls that are wrong."""
        if self._first_refusal is not None and not self._n_answered:
            raise EngineFault(
                f"{self.place} has answered no call of model {self.config.model!r}; the first refusal: "
                f"{self._first_refusal.message}",
                hint="where it does not take a setting: rollouts.engine.omit=[seed], or "
                "rollouts.engine.token_limit=max_completion_tokens",
            )

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Everything below runs in the endpoint's own loop.

    async def _asked(self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Answer]) -> Asked:
        n_failed, n_limited, waited_s = 0, 0, 0.0
        while True:
            try:
                async with self._slots:
                    await self._pace.turn()
                    asked = await self._once(path, body, read)
                self._n_answered += 1
                return asked
            except CallRefused as refusal:
                self._first_refusal = self._first_refusal or refusal
                raise
            except _Failed as failed:
                if failed.too_often:
                    n_limited += 1
                    wait_s = _pause_s(n_limited) if failed.wait_s is None else failed.wait_s
                    waited_s += wait_s
                    if waited_s > self._execution.patience_s:
                        raise EngineFault(
                            f"{self.place} asks to wait {wait_s:.0f} s more, and a call may wait "
                            f"{self._execution.patience_s:g} s in all: {failed.what}",
                            hint="the same command continues later; or raise rollouts.engine.patience_s, or lower "
                            "rollouts.engine.requests_per_minute",
                        ) from None
                    self._pace.hold(wait_s)
                    continue
                n_failed += 1
                if n_failed >= self._execution.attempts:
                    raise EngineFault(
                        f"{self.place} was asked {n_failed} times in vain; the last time: {failed.what}",
                        hint="the same command continues once it answers",
                    ) from None
                await asyncio.sleep(max(failed.wait_s or 0.0, _pause_s(n_failed)))

    async def _once(self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], Answer]) -> Asked:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._execution.timeout_s, sock_connect=_CONNECT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        url = self.config.base_url + path
        started_at, began = datetime.now(UTC), time.perf_counter()
        try:
            # A redirect could carry the key to another host.
            async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as response:
                text = self._without_key((await response.read()).decode("utf-8", "replace"))
                status, wait_s = response.status, retry_after(response.headers.get("Retry-After"))
        except TimeoutError:
            raise _Failed(f"no answer within {self._execution.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(self.mask(f"{type(error).__name__}: {error}")) from None
        if status != 200:
            self._refuse(status, wait_s, text)
        try:
            told = json.loads(text)
            if not isinstance(told, dict):
                raise Nonsense("it is no object")
            read(told)
        except (ValueError, RecursionError, Nonsense) as error:
            why = str(error) if isinstance(error, Nonsense) else "it is no JSON"
            raise _Failed(f"its answer makes no sense ({why}): {self._shown(text)}") from None
        return Asked(told, started_at, time.perf_counter() - began)

    def _refuse(self, status: int, wait_s: float | None, text: str) -> None:
        """Raises what an answer with this status means."""
        code, message = self._error_in(text)
        what = f"status {status}: {message}"
        variable, model = self._execution.key_env, self.config.model
        if status in (401, 403):
            raise EngineFault(
                f"{self.place} does not let us in ({what})",
                hint="it wants a key: name the variable that holds it (rollouts.engine.key_env)"
                if variable is None
                else f"is the key in {variable} the right one, and may it use model {model!r}?",
            )
        if status == 402 or code == "insufficient_quota":
            raise EngineFault(f"{self.place} wants to be paid first ({what})")
        if status == 404 or code in _NO_MODEL:
            raise EngineFault(
                f"{self.place} has no model {model!r}, or does not serve it at {self.config.base_url} ({what})",
                hint="is the name right, and does the base URL end as its documentation says, often with /v1?",
            )
        if status in _AGAIN or status >= 500:
            raise _Failed(what, wait_s, too_often=status == 429 or (status == 503 and wait_s is not None))
        if status in _THIS_CALL:
            raise CallRefused(f"{self.place} refuses the call ({what})")
        raise EngineFault(f"{self.place} is no such endpoint ({what})", hint="is the base URL right?")

    def _error_in(self, text: str) -> tuple[Any, str]:
        """Code and message of an error, in the forms that are met."""
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            return None, self._shown(text)
        error = told.get("error", told) if isinstance(told, dict) else told
        if not isinstance(error, dict):
            return None, self._shown(str(error))
        message = error.get("message") or error.get("detail") or json.dumps(error, ensure_ascii=False)
        return error.get("code") or error.get("type"), self._shown(str(message))

    def _shown(self, text: str) -> str:
        text = " ".join(self.mask(text).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

    def _without_key(self, text: str) -> str:
        return text if self._key is None or len(self._key) < SHORTEST else text.replace(self._key, MASK)

    async def _stop(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


def _pause_s(n: int) -> float:
    """Before the n-th try again, spread so that calls that have failed together do not come back together."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (n - 1)) * random.uniform(0.75, 1.25)


_OPEN: dict[str, tuple[Endpoint, int]] = {}
"""Those in use, with the number of their users."""
_GATE = threading.Lock()


@contextmanager
def opened(config: EndpointConfig, execution: EndpointExecution) -> Iterator[Endpoint]:
    """The endpoint of this process for these settings; shards side by side share it and its limits.

    Raises:
        ConfigError: there is no key.
    """
    name = canonical_hash([config, execution])
    with _GATE:
        endpoint, n_users = _OPEN[name] if name in _OPEN else (Endpoint(config, execution), 0)
        _OPEN[name] = endpoint, n_users + 1
    try:
        yield endpoint
    finally:
        with _GATE:
            endpoint, n_users = _OPEN.pop(name)
            if n_users > 1:
                _OPEN[name] = endpoint, n_users - 1
            else:
                endpoint.close()
