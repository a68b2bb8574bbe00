"""A server that somebody else has started: it is asked, never stopped, and left as it is unless that is allowed."""

from collections.abc import Callable

from schemas.errors import StageFailed
from stages.rollouts.engines.base import PolicyFiles
from stages.rollouts.workers.server import Server
from stages.rollouts.workers.settings import VllmExecution
from stages.rollouts.workers.worker import Worker


class GivenWorker(Worker):
    """A server at a URL."""

    def __init__(self, server: Server, execution: VllmExecution, tolerance: float, changed: Callable[[], None]):
        super().__init__(f"vllm at {server.place}", f"vllm:{server.place}", execution, tolerance, changed)
        self._server = server

    @property
    def server(self) -> Server:
        return self._server

    def _ended(self) -> str | None:
        return None

    def begin_end(self) -> None:
        """It is not ours to end."""

    def end(self) -> None:
        """Nor here."""

    async def _end(self) -> None:
        """Nor here."""

    async def _bring_up(self, policy: PolicyFiles) -> None:
        models = await self._server.models()
        if not models:
            raise StageFailed(f"{self.name} serves no model")
        self._recognise(await self._server.version(), models[0])
        try:
            await self._check(policy)
        except StageFailed as fault:
            if self._execution.update != "in_place":
                hint = "it is left as it is: load the policy there, or set execution.rollouts.vllm.update=in_place"
                raise StageFailed(fault.message, hint=f"{fault.hint}; {hint}" if fault.hint else hint) from fault
            await self._server.call_workers("reload_weights", weights_path=str(policy.folder))
            await self._check_change(policy)
