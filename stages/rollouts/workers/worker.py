"""A worker: a vLLM server that takes a policy, proves that it has it, is watched, and is replaced when it fails."""

import asyncio
import contextlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from schemas.errors import StageFailed
from stages.rollouts.engines.base import GenerationRequest, PolicyFiles
from stages.rollouts.engines.progress import Pieces, Progress
from stages.rollouts.workers.answers import Answer, part_of, sampled, sampling_of, whole_of
from stages.rollouts.workers.command import is_too_old
from stages.rollouts.workers.dialects import DIALECTS, Dialect, Told, UnusableAnswer
from stages.rollouts.workers.limit import Limit
from stages.rollouts.workers.server import Load, Model, Server, ServerFault
from stages.rollouts.workers.settings import VllmExecution
from stages.rollouts.workers.verify import Probing, dialect_of, verify

LOG = logging.getLogger("rollmill.vllm")
_LONGEST_PAUSE_S = 60.0
_SHORTEST_PAUSE_S = 0.2
_LOOK_TIMEOUT_S = 10.0
_BAD_ANSWERS = 3
"""Unusable answers in a row after which a worker is replaced."""


def in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Calls the function in the loop, whichever one runs here; never, where the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


class WorkerLost(Exception):
    """The worker failed while it had the call."""


class Worker(ABC):
    """One server. It is looked after in one event loop, and asked in any."""

    def __init__(self, name: str, label: str, execution: VllmExecution, tolerance: float, changed: Callable[[], None]):
        self.name = name
        self.label = label
        """How the ``steps`` table calls it."""
        self.version = "unknown"
        self.context_length: int | None = None
        self.policy: PolicyFiles | None = None
        """What it has proved to serve; None: it serves nothing."""
        self.trouble: str | None = None
        """Why it last failed."""
        self.is_gone = False
        """It is not tried again for this policy."""
        self.is_suspect = False
        """A call has found it unreachable; no more calls until it has been looked at."""
        self.limit = Limit(execution.max_in_flight)
        self._execution = execution
        self._tolerance = tolerance
        self._changed = changed
        self._model = ""
        """Its name at the server; an adapter has one of its own."""
        self._dialect = DIALECTS[-1]
        self._salt = ""
        """Of the prefix cache: nothing that was computed before the policy was taken is ever used after it."""
        self._calls: set[asyncio.Task[Told]] = set()
        self._alarm = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        """In which it is looked after."""
        self._failures = 0
        self._bad_answers = 0

    @property
    def n_calls(self) -> int:
        return len(self._calls)

    @property
    @abstractmethod
    def server(self) -> Server: ...

    @abstractmethod
    async def _bring_up(self, policy: PolicyFiles) -> None:
        """Gets the policy into the server, and proves that it is there."""

    @abstractmethod
    def _ended(self) -> str | None:
        """What happened, if the server is known to be no more."""

    async def take(self, policy: PolicyFiles) -> None:
        """Serves the policy from now on.

        Raises:
            StageFailed: it does not, and why.
        """
        self.policy, self.is_gone, self.is_suspect = None, False, False
        self._loop = asyncio.get_running_loop()
        try:
            await self._bring_up(policy)
        except (ServerFault, UnusableAnswer) as fault:
            self.trouble = f"{self.name}: {self._ended() or fault}"
            await self._end()
            raise StageFailed(self.trouble) from fault
        except StageFailed as fault:
            self.trouble = str(fault)
            await self._end()
            raise
        self._salt = f"{policy.policy_id}-{secrets.token_hex(8)}"
        self.policy, self.trouble, self._bad_answers = policy, None, 0
        self._alarm.clear()
        self._changed()

    async def supervise(self, policy: PolicyFiles) -> None:
        """Watches the worker, and brings it back when it fails, until it is given up."""
        while True:
            if self.policy is not None:
                self._lose(await self._watch())
                await self._end()
            self._failures += 1
            if self._failures >= self._execution.max_failures:
                LOG.warning("%s is given up after %d failures: %s", self.name, self._failures, self.trouble)
                self.is_gone = True
                self._changed()
                return
            pause_s = min(_LONGEST_PAUSE_S, self._execution.backoff_s * 2 ** (self._failures - 1))
            LOG.warning("%s has failed and is tried again in %g s: %s", self.name, pause_s, self.trouble)
            await asyncio.sleep(pause_s)
            try:
                await self.take(policy)
            except StageFailed:
                continue

    async def ask(self, request: GenerationRequest, vocabulary: int) -> Answer:
        """The answer to one model call.

        Raises:
            WorkerLost: the worker failed meanwhile.
            ServerFault: it did not answer, or refused.
            UnusableAnswer: it answered something else.
        """
        assert self.policy is not None
        dialect = self._dialect
        body = dialect.body(request.prompt_ids, sampling_of(request))
        body |= {"model": self._model, "cache_salt": self._salt}
        call = asyncio.ensure_future(self._told(dialect, body, request.progress, vocabulary))
        self._calls.add(call)
        try:
            answer = sampled(await call, request, vocabulary)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise WorkerLost(self.trouble or f"{self.name} has failed") from None
        except ServerFault as fault:
            if fault.status is None:
                self.is_suspect = True
                self._raise_alarm()
            raise
        except UnusableAnswer as fault:
            self._bad_answers += 1
            self.trouble = f"{self.name} gave an unusable answer: {fault}"
            self._raise_alarm()
            raise
        finally:
            call.cancel()
            self._calls.discard(call)
        self._bad_answers = self._failures = 0
        return answer

    async def _told(self, dialect: Dialect, body: dict[str, Any], progress: Progress | None, vocabulary: int) -> Told:
        """What the server says, piece by piece where somebody reads along, which costs it more."""
        timeout_s = self._execution.request_timeout_s
        if progress is None or not progress.is_followed:
            return dialect.read(await self.server.complete(dialect.path, body, timeout_s))
        parts: list[Told] = []
        pieces = Pieces()
        progress.begin(pieces.so_far)
        async with aclosing(self.server.stream(dialect.path, body | {"stream": True}, timeout_s)) as events:
            async for data in events:
                parts.append(part := dialect.read(data))
                if part.ids:
                    pieces.add(part_of(part, vocabulary))
                    progress.more()
        return whole_of(parts)

    @abstractmethod
    def begin_end(self) -> None:
        """Begins to end what this worker has started."""

    @abstractmethod
    def end(self) -> None:
        """Ends what this worker has started, and waits for it."""

    @abstractmethod
    async def _end(self) -> None:
        """The same as ``end``, without holding up the loop."""

    async def _check_change(self, policy: PolicyFiles) -> None:
        """Nothing is left of the old weights, and the new ones are there."""
        for _ in range(50):
            if await self.server.reset_prefix_cache() is not False:
                break
            await asyncio.sleep(_SHORTEST_PAUSE_S)
        else:
            raise StageFailed(f"{self.name}: its prefix cache cannot be reset, so it could answer from older weights")
        await self._check(policy)

    async def _check(self, policy: PolicyFiles) -> None:
        await verify(Probing(self.server, self._dialect, self._model), policy, self._tolerance)

    async def _recognise(self, model: Model) -> None:
        """Takes in who answers there, before it has proved anything."""
        version = await self.server.version()
        if is_too_old(version):
            raise StageFailed(f"{self.name} runs vLLM {version}, and 0.20 is the oldest that is spoken here")
        self.version, self._model, self.context_length = version, model.name, model.context_length
        self._dialect = await dialect_of(self.server, model.name, 0)

    async def _watch(self) -> str:
        """Returns what is wrong as soon as something is."""
        hang_s, last_sign = self._execution.hang_timeout_s, time.monotonic()
        progress, last_step = -1.0, time.monotonic()
        while True:
            if ended := self._ended():
                return ended
            if self._bad_answers >= _BAD_ANSWERS:
                return f"{self._bad_answers} unusable answers in a row; the last: {self.trouble}"
            try:
                await self.server.check_health(min(_LOOK_TIMEOUT_S, hang_s))
                load = await self.server.load(min(_LOOK_TIMEOUT_S, hang_s))
            except ServerFault as fault:
                if fault.is_refused or fault.status == 503:
                    await asyncio.sleep(_SHORTEST_PAUSE_S)  # the process that has gone may know better
                    return self._ended() or str(fault)
                if time.monotonic() - last_sign > hang_s:
                    return f"no sign of life for {hang_s:g} s: {fault}"
            else:
                last_sign = time.monotonic()
                if load.progress < progress:
                    return "it has been started anew, so it has to prove its weights again"
                if self.n_calls == 0 or load.progress != progress:
                    progress, last_step = load.progress, last_sign
                elif last_sign - last_step > self._execution.stall_timeout_s:
                    return f"not one token for {self._execution.stall_timeout_s:g} s, with {self.n_calls} calls"
                self._observe(load)
            await self._pause()

    def _observe(self, load: Load) -> None:
        before = self.limit.value
        self.limit.observe(load, self.n_calls)
        if self.is_suspect or self.limit.value > before:
            self.is_suspect = False
            self._changed()

    async def _pause(self) -> None:
        """Until the next look, which comes early where a call has met a fault."""
        await asyncio.sleep(_SHORTEST_PAUSE_S)
        try:
            await asyncio.wait_for(self._alarm.wait(), self._execution.health_interval_s)
        except TimeoutError:
            return
        self._alarm.clear()

    def _lose(self, reason: str) -> None:
        self.policy, self.trouble = None, f"{self.name}: {reason}"
        self.drop_calls()
        self._changed()

    def drop_calls(self) -> None:
        """Gives up the calls that it has."""
        for call in list(self._calls):
            in_loop(call.get_loop(), call.cancel)

    def _raise_alarm(self) -> None:
        assert self._loop is not None
        in_loop(self._loop, self._alarm.set)
