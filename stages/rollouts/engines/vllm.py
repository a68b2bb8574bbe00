"""The engine over vLLM: workers on this machine or given ones, spoken to over HTTP. vLLM itself is never imported.

One thread with an event loop of its own looks after the workers. Calls are made in the event loop that they come from
where that is at home here (``at_home``), else in that one.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from schemas.errors import StageFailed
from stages.rollouts.checkpoint import context_length_of, model_config
from stages.rollouts.engines.base import (
    Engine,
    EngineFault,
    Generation,
    GenerationRequest,
    PolicyFiles,
    Retry,
    SchemaRefused,
)
from stages.rollouts.workers.answers import UnusableAnswer
from stages.rollouts.workers.command import slots, vllm_python
from stages.rollouts.workers.given import GivenWorker
from stages.rollouts.workers.local import LocalWorker
from stages.rollouts.workers.pool import Pool
from stages.rollouts.workers.server import Connections, Server, ServerFault
from stages.rollouts.workers.settings import VllmConfig, VllmExecution
from stages.rollouts.workers.worker import LOG, Worker, WorkerLost

_ATTEMPTS = 5
"""Workers that are asked, one after another, before a call is given up."""
_CLOSED = "engine vllm has stopped: it was closed"
_TICK_S = 1.0
_FAULT_HOLDS_S = 5.0
"""Who asks so soon after the workers were lost is told so at once, and does not wait for them to fail again."""

Result = TypeVar("Result")


class VllmEngine(Engine):
    """Sampling by vLLM servers."""

    name = "vllm"
    logprob_mode = "raw"
    takes_schemas = True

    def __init__(self, config: VllmConfig, execution: VllmExecution, *, probe_tolerance: float):
        super().__init__()
        self._config = config
        self._execution = execution
        self._tolerance = probe_tolerance
        self._owner = os.getpid()
        self._pool = Pool(execution.gone_timeout_s)
        self._connections = Connections()
        self._supervisors: list[asyncio.Task[None]] = []
        self._vocabulary = 0
        self._context_length: int | None = None
        self._fault: StageFailed | None = None
        """Why the last policy is not served."""
        self._fault_of = ""
        self._fault_until = 0.0
        self._is_closed = False
        self._gate = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollmill-vllm-engine", daemon=True)
        self._thread.start()

    @property
    def context_length(self) -> int:
        if self._context_length is None:
            raise EngineFault("engine vllm: no policy is loaded")
        return self._context_length

    @property
    def broken(self) -> bool:
        return self._is_closed

    @property
    def workers(self) -> list[Worker]:
        """All, serving or not."""
        return list(self._pool.workers)

    def facts(self) -> dict[str, list[str]]:
        serving = [worker for worker in self._pool.workers if worker.policy is not None]
        return {"vllm_versions": sorted({worker.version for worker in serving})}

    def _load(self, policy: PolicyFiles) -> None:
        if self._fault is not None and self._fault_of == policy.policy_id and time.monotonic() < self._fault_until:
            raise self._fault
        self._in_loop(self._take(policy)).result()

    async def generate(self, request: GenerationRequest) -> Generation:
        if self._connections.are_open:
            return await self._answer(request)
        return await asyncio.wrap_future(self._in_loop(self._answer(request)))

    @asynccontextmanager
    async def at_home(self) -> AsyncIterator[None]:
        self._connections.open()
        try:
            yield
        finally:
            await self._connections.close()

    def close(self) -> None:
        with self._gate:
            if self._is_closed or os.getpid() != self._owner:
                return
            self._is_closed = True
        self._pool.close(EngineFault(_CLOSED))
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for worker in self._pool.workers:
            worker.begin_end()
        for worker in self._pool.workers:
            worker.end()

    def _in_loop(self, work: "Coroutine[Any, Any, Result]") -> Any:
        with self._gate:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise EngineFault(_CLOSED)

    # Everything below runs in the engine's own loop, but for ``_answer`` and ``_failed``.

    async def _take(self, policy: PolicyFiles) -> None:
        await self._stop_supervisors()
        if not self._pool.workers:
            self._pool.workers = await self._make_workers()
        config = model_config(policy.folder)
        self._vocabulary = {**config, **config.get("text_config", {})}["vocab_size"]
        self._pool.forget()
        workers = self._pool.workers
        taken = await asyncio.gather(*[worker.take(policy) for worker in workers], return_exceptions=True)
        faults = []
        for fault in filter(None, taken):
            if not isinstance(fault, StageFailed):
                raise fault
            faults.append(fault)
        if len(faults) == len(workers):
            self._failed(faults[0], policy.policy_id)
        for fault in faults:
            LOG.warning("%s", fault)
        lengths = [worker.context_length for worker in workers if worker.policy is not None]
        self._context_length = min(context_length_of(policy.folder), *filter(None, lengths))
        self._supervisors = [
            asyncio.create_task(work) for work in (self._tick(), *[worker.supervise(policy) for worker in workers])
        ]

    async def _make_workers(self) -> list[Worker]:
        execution = self._execution
        if not self._connections.are_open:
            self._connections.open()
        connections = self._connections
        if isinstance(execution.workers, list):
            servers = [Server(url, connections, os.environ.get("VLLM_API_KEY")) for url in execution.workers]
            return [GivenWorker(server, execution, self._tolerance, self._pool.changed) for server in servers]
        python = vllm_python(execution)
        log_dir = Path(execution.log_dir or os.environ.get("ROLLMILL_LOGS") or "logs").absolute()
        return [
            LocalWorker(
                slot, self._config, execution, python, log_dir, self._tolerance, connections, self._pool.changed
            )
            for slot in await asyncio.to_thread(slots, execution, python)
        ]

    async def _tick(self) -> None:
        """Calls that wait for a worker learn that none will come."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._pool.trouble() is not None:
                self._pool.changed()

    async def _answer(self, request: GenerationRequest) -> Generation:
        started_at, began = datetime.now(UTC), time.perf_counter()
        failed: Worker | None = None
        retries: list[Retry] = []
        for _ in range(_ATTEMPTS):
            asked_at = datetime.now(UTC)
            try:
                worker = await self._pool.acquire(request, failed)
            except EngineFault as gone:
                self._failed(gone, self.policy_id or "")
            policy = worker.policy
            assert policy is not None
            try:
                answer = await worker.ask(request, self._vocabulary)
            except (WorkerLost, UnusableAnswer, ServerFault) as error:
                status = error.status if isinstance(error, ServerFault) else None
                if request.sampling.json_schema is not None and status == 400:
                    raise SchemaRefused(f"{worker.name} takes no such JSON schema: {error}") from error
                if status is not None and 400 <= status < 500 and status not in (408, 429):
                    raise EngineFault(f"{worker.name} has refused a call: {error}") from error
                failed = worker
                retries.append(Retry(worker.label, asked_at, type(error).__name__, str(error)))
            else:
                return Generation(
                    response_ids=answer.response_ids,
                    logprobs=answer.logprobs,
                    finish_reason=answer.finish_reason,
                    policy_id=policy.policy_id,
                    worker=worker.label,
                    started_at=started_at,
                    latency_s=time.perf_counter() - began,
                    retries=tuple(retries),
                )
            finally:
                self._pool.give_back(worker)
        raise EngineFault(f"a model call was tried {_ATTEMPTS} times in vain; the last time: {retries[-1].message}")

    def _failed(self, fault: StageFailed, policy_id: str) -> NoReturn:
        """No worker serves: the policy has to be loaded again, and for a moment that is refused."""
        if policy_id:  # else another call has said it already
            self.policy_id, self._fault, self._fault_of = None, fault, policy_id
            self._fault_until = time.monotonic() + _FAULT_HOLDS_S
        raise fault

    async def _stop_supervisors(self) -> None:
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._supervisors = []

    async def _stop(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._connections.close()
