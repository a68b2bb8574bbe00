"""A server that somebody else has started: it is asked, never stopped, and left as it is unless that is allowed."""

from collections.abc import Callable
from pathlib import Path

from schemas.errors import StageFailed
from stages.rollouts.engines.base import PolicyFiles
from stages.rollouts.workers.server import Server, ServerFault
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
        own = [model for model in models if not model.is_adapter]
        if not own:
            raise StageFailed(f"{self.name} serves no model")
        await self._recognise(own[0])
        if policy.adapter is not None:
            if policy.adapter_name not in [model.name for model in models]:
                await self._load_adapter(policy.adapter_name, policy.adapter)
            self._model = policy.adapter_name
        try:
            await self._check(policy)
        except StageFailed as fault:
            if self._execution.update != "in_place":
                hint = "it is left as it is: load the policy there, or set execution.rollouts.vllm.update=in_place"
                raise StageFailed(fault.message, hint=f"{fault.hint}; {hint}" if fault.hint else hint) from fault
            await self._reload(policy.folder)
            await self._check_change(policy)

    async def _reload(self, folder: Path) -> None:
        try:
            await self._server.call_workers("reload_weights", weights_path=str(folder))
        except ServerFault as fault:
            if fault.status != 404:
                raise
            raise StageFailed(
                f"{self.name} does not let its weights be changed: {fault}",
                hint="it must run with VLLM_SERVER_DEV_MODE=1; or load the policy there yourself",
            ) from fault

    async def _load_adapter(self, name: str, folder: Path) -> None:
        """It stays loaded, as others may use it; a server drops those that nobody does."""
        try:
            await self._server.load_adapter(name, str(folder))
        except ServerFault as fault:
            if fault.status is None:
                raise
            raise StageFailed(
                f"{self.name} does not load the adapter: {fault}",
                hint=f"it must see the folder {folder}, and run with --enable-lora, a --max-lora-rank of the adapter's "
                "rank or more, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
            ) from fault
