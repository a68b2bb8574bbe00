"""Chooses a worker for each call: the one that has seen the prompt, else the least busy; waits while all are full."""

import asyncio
import threading
import time
from collections import OrderedDict, deque
from functools import partial

from stages.rollouts.engines.base import EngineFault, GenerationRequest
from stages.rollouts.workers.worker import Worker, in_loop

_REMEMBERED = 100_000
"""Prompts and sessions whose worker is remembered."""


class Pool:
    """The workers of an engine, for calls from any event loop."""

    def __init__(self, gone_timeout_s: float):
        self.workers: list[Worker] = []
        self._gone_timeout_s = gone_timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._homes: OrderedDict[bytes | str, Worker] = OrderedDict()
        self._taken: dict[Worker, int] = {}
        self._last_served = time.monotonic()
        self._closed: EngineFault | None = None
        self._gate = threading.RLock()

    async def acquire(self, request: GenerationRequest, avoid: Worker | None) -> Worker:
        """A worker with room for the call; to be given back.

        Args:
            avoid: the worker that has just failed at this call; taken only where no other serves.
        Raises:
            EngineFault: there is none any more, or none came back in time.
        """
        is_first = True
        while True:
            with self._gate:
                worker = None if is_first and self._waiting else self._choose(request, avoid)
                if worker is not None:
                    self._taken[worker] = self._taken.get(worker, 0) + 1
                    return worker
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                if is_first:
                    self._waiting.append(turn)
                else:
                    self._waiting.appendleft(turn)
            is_first = False
            try:
                await turn
            except asyncio.CancelledError:
                with self._gate:
                    self._wake(1)  # the turn may have been given to this call
                raise

    def give_back(self, worker: Worker) -> None:
        with self._gate:
            self._taken[worker] -= 1
            self._wake(1)

    def changed(self) -> None:
        """A worker has come, gone, or has more room."""
        with self._gate:
            if any(worker.policy is not None for worker in self.workers):
                self._last_served = time.monotonic()
            self._wake(len(self._waiting))

    def forget(self) -> None:
        """New weights: what a worker has seen is worth nothing any more."""
        with self._gate:
            self._homes.clear()

    def close(self, fault: EngineFault) -> None:
        """Calls are refused with this from now on, those that wait and those that workers have among them."""
        with self._gate:
            self._closed = fault
            self._wake(len(self._waiting))
        for worker in self.workers:
            worker.drop_calls()

    def trouble(self) -> EngineFault | None:
        """Why no call will ever be answered again, where that is so."""
        if self._closed is not None:
            return self._closed
        if any(worker.policy is not None for worker in self.workers):
            self._last_served = time.monotonic()
            return None
        told = "\n".join(worker.trouble or f"{worker.name} has not started" for worker in self.workers)
        if all(worker.is_gone for worker in self.workers):
            return EngineFault("engine vllm: all workers are gone", hint=told)
        if time.monotonic() - self._last_served > self._gone_timeout_s:
            return EngineFault(f"engine vllm: no worker has served for {self._gone_timeout_s:g} s", hint=told)
        return None

    def _choose(self, request: GenerationRequest, avoid: Worker | None) -> Worker | None:
        if fault := self.trouble():
            raise fault
        serving = [worker for worker in self.workers if worker.policy is not None and not worker.is_suspect]
        free = [worker for worker in serving if self._taken.get(worker, 0) < worker.limit.value]
        if len(serving) > 1:
            free = [worker for worker in free if worker is not avoid]
        if not free:
            return None
        keys: tuple[str | bytes, ...] = (request.session, request.prompt_ids.tobytes())
        home = next((self._homes[key] for key in keys if key in self._homes), None)
        worker = home if home in free else min(free, key=lambda one: self._taken.get(one, 0) / one.limit.value)
        assert worker is not None
        for key in keys:
            if key:
                self._homes[key] = worker
                self._homes.move_to_end(key)
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return worker

    def _wake(self, count: int) -> None:
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                in_loop(turn.get_loop(), partial(_give, turn))
                count -= 1


def _give(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
