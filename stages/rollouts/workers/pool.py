"""Chooses a worker for each call: the one that has seen the prompt, else the least busy; waits while all are full."""

import asyncio
import time
from collections import OrderedDict, deque

from stages.rollouts.engines.base import EngineFault, GenerationRequest
from stages.rollouts.workers.worker import Worker

_REMEMBERED = 100_000
"""Prompts and sessions whose worker is remembered."""


class Pool:
    """The workers of an engine, in its event loop."""

    def __init__(self, gone_timeout_s: float):
        self.workers: list[Worker] = []
        self._gone_timeout_s = gone_timeout_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._homes: OrderedDict[bytes | str, Worker] = OrderedDict()
        self._taken: dict[Worker, int] = {}
        self._last_served = time.monotonic()

    async def acquire(self, request: GenerationRequest, avoid: Worker | None) -> Worker:
        """A worker with room for the call; to be given back.

        Args:
            avoid: the worker that has just failed at this call; taken only where no other serves.
        Raises:
            EngineFault: there is none any more, or none came back in time.
        """
        worker = None if self._waiting else self._choose(request, avoid)
        enqueue = self._waiting.append
        while worker is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            enqueue(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake(1)  # the turn may have been given to this call
                raise
            worker = self._choose(request, avoid)
            enqueue = self._waiting.appendleft
        self._taken[worker] = self._taken.get(worker, 0) + 1
        return worker

    def give_back(self, worker: Worker) -> None:
        self._taken[worker] -= 1
        self._wake(1)

    def changed(self) -> None:
        """A worker has come, gone, or has more room."""
        if any(worker.policy is not None for worker in self.workers):
            self._last_served = time.monotonic()
        self._wake(len(self._waiting))

    def forget(self) -> None:
        """New weights: what a worker has seen is worth nothing any more."""
        self._homes.clear()

    def trouble(self) -> EngineFault | None:
        """Why no call will ever be answered again, where that is so."""
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
                turn.set_result(None)
                count -= 1
