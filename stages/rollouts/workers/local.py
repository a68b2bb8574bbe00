"""A server on this machine that the pipeline starts, updates, restarts and ends."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from schemas.errors import StageFailed
from stages.rollouts.checkpoint import model_config
from stages.rollouts.engines.base import PolicyFiles
from stages.rollouts.workers.command import RELOAD_METHOD, Slot, adapter_rank, command, served_rank
from stages.rollouts.workers.dialects import UnusableAnswer
from stages.rollouts.workers.ports import HeldPort, hold_port
from stages.rollouts.workers.process import ServerProcess
from stages.rollouts.workers.server import Connections, Server, ServerFault
from stages.rollouts.workers.settings import VllmConfig, VllmExecution
from stages.rollouts.workers.worker import LOG, Worker

_GRACE_S = 10.0
_LOOK_S = 0.25
_PORTS = 5
"""Ports that are tried before a start is given up."""
_PORT_TAKEN = re.compile(r"address already in use|errno 98", re.IGNORECASE)


class LocalWorker(Worker):
    """A child process."""

    def __init__(
        self,
        slot: Slot,
        config: VllmConfig,
        execution: VllmExecution,
        python: str,
        log_dir: Path,
        tolerance: float,
        connections: Connections,
        changed: Callable[[], None],
    ):
        super().__init__(f"vllm worker {slot.index}", f"vllm:{slot.index}", execution, tolerance, changed)
        self._slot = slot
        self._config = config
        self._python = python
        self._log_file = log_dir / f"vllm-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}-{slot.index}.log"
        self._connections = connections
        self._server: Server | None = None
        self._process: ServerProcess | None = None
        self._port: HeldPort | None = None
        self._shape: object = None
        """Of the model that it was started with; another one needs another start."""
        self._max_rank = 0
        """Of the adapters that it was started for; 0: none."""
        self._base_name = ""
        self._weights: Path | None = None
        """Of the checkpoint that it has; None: not known."""
        self._adapter_name: str | None = None
        """Of the adapter that it has."""
        self._updates_in_place = execution.update != "restart"

    @property
    def server(self) -> Server:
        if self._server is None:
            raise ServerFault(f"{self.name} has not been started")
        return self._server

    def _ended(self) -> str | None:
        if self._process is None or self._process.exit_code is None:
            return None
        return f"its process has ended (exit code {self._process.exit_code}); {self._log_end()}"

    def begin_end(self) -> None:
        if self._process is not None:
            self._process.ask_to_end()

    def end(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = self._server = None
        if self._port is not None:
            self._port.release()
        self._port = None

    async def _end(self) -> None:
        if self._process is not None:
            self._process.ask_to_end()
            deadline = time.monotonic() + 2 * _GRACE_S
            while self._process.exit_code is None and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_S / 5)
        self.end()

    async def _bring_up(self, policy: PolicyFiles) -> None:
        is_running = self._process is not None and self._process.exit_code is None
        fits = self._shape == model_config(policy.folder) and adapter_rank(policy) <= self._max_rank
        if is_running and self._updates_in_place and fits:
            try:
                is_base_there = policy.adapter is not None and self._weights == policy.folder
                await self._update(policy, with_weights=not is_base_there)
                return
            except (StageFailed, ServerFault, UnusableAnswer) as fault:
                if self._execution.update == "in_place":
                    raise
                LOG.warning("%s cannot be updated in place and is restarted: %s", self.name, fault)
                self._updates_in_place = not isinstance(fault, StageFailed)  # wrong once, wrong again
        await self._start(policy)
        await self._update(policy, with_weights=False)

    async def _update(self, policy: PolicyFiles, *, with_weights: bool) -> None:
        """Gives the running server the policy's adapter, if it has one, and the weights of its checkpoint if told."""
        if self._adapter_name is not None:
            name, self._adapter_name = self._adapter_name, None
            await self.server.unload_adapter(name)
        if with_weights:
            self._weights = None
            await self.server.call_workers(RELOAD_METHOD, folder=str(policy.folder))
            self._weights = policy.folder
        self._model = self._base_name
        if policy.adapter is not None:
            await self.server.load_adapter(policy.adapter_name, str(policy.adapter))
            self._model = self._adapter_name = policy.adapter_name
        await self._check_change(policy)

    async def _start(self, policy: PolicyFiles) -> None:
        first = self._execution.port
        for _ in range(_PORTS):
            await self._end()
            self._port = hold_port(None if first is None else first + self._slot.index)
            name = f"policy-{secrets.token_hex(4)}"  # nobody else's
            words, environment = command(
                policy, name, self._port.number, self._slot, self._config, self._execution, self._python
            )
            self._server = Server(f"http://127.0.0.1:{self._port.number}", self._connections)
            self._process = ServerProcess(words, environment, self._log_file, _GRACE_S)
            if await self._is_ready():
                break
            first = None if first is None else self._port.number + 1 - self._slot.index
        else:
            raise StageFailed(f"{self.name} has found {_PORTS} ports taken, one after another")
        served = {model.name: model for model in await self.server.models()}
        if name not in served:
            raise StageFailed(f"{self.name}: another server answers at {self.server.place}")
        await self._recognise(served[name])
        self._shape, self._max_rank = model_config(policy.folder), served_rank(policy, self._execution)
        self._base_name, self._weights, self._adapter_name = name, policy.folder, None

    async def _is_ready(self) -> bool:
        """Waits until it answers. False: its port was taken from it.

        Raises:
            StageFailed: it has ended, or the deadline is over; with the end of its log.
        """
        assert self._process is not None
        began = time.monotonic()
        while self._process.exit_code is None:
            try:
                await self.server.check_health(5)
                return True
            except ServerFault:
                await asyncio.sleep(_LOOK_S)
            if time.monotonic() - began > self._execution.start_timeout_s:
                told = self._log_end()
                await self._end()
                raise StageFailed(
                    f"{self.name} was not ready within {self._execution.start_timeout_s:g} s of its start", hint=told
                )
        if _PORT_TAKEN.search(self._process.log_tail(200)):
            return False
        raise StageFailed(
            f"{self.name} has ended while it started (exit code {self._process.exit_code})", hint=self._log_end()
        )

    def _log_end(self) -> str:
        assert self._process is not None
        errors = [f"it said: {error}\n" for error in self._process.log_errors()]
        return f"{''.join(errors)}the end of its log {self._log_file}:\n  {self._process.log_tail()}"
