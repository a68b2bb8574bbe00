"""A session whose calls come from a program that runs elsewhere; each is written down before its answer is given."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from schemas.canonical import seed_from
from schemas.errors import RollmillError
from stages.rollouts.calls import ModelAnswer, ModelCall
from stages.rollouts.capture.config import GatewayConfig
from stages.rollouts.capture.log import Captured, CapturedCall, End, FailedCall, Head, SessionLog
from stages.rollouts.chat_template import ChatTemplate
from stages.rollouts.engines.base import (
    Engine,
    EngineFault,
    Generation,
    GenerationRequest,
    PolicyFiles,
    SamplingParams,
)
from stages.rollouts.engines.progress import Partial, Progress
from stages.rollouts.masking import Masker
from stages.rollouts.sdk import EpisodeClosed, Messages
from stages.rollouts.session import Session
from stages.rollouts.telling import Teller

_MESSAGE_LIMIT = 2000
"""Characters of a fault's message that are kept."""
_ABANDONED = "its caller, or the session, ended before the answer"


class Differs(RollmillError):
    """A captured call cannot be made again as it was: this version writes its prompt otherwise."""


@dataclass(eq=False)
class _Asked:
    """What the engine was asked for a call, and what it gave."""

    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    progress: Progress = field(default_factory=Progress)
    captured: CapturedCall | None = None
    """Where the call was made before, and its answer is known."""
    request: GenerationRequest | None = None
    generation: Generation | None = None


_asked: ContextVar[_Asked] = ContextVar("asked")


class CapturedEngine(Engine):
    """An engine that tells each session's calls what it was asked and gave; it outlives the servers behind it."""

    def __init__(self, engine: Engine, policy: PolicyFiles):
        super().__init__()
        self.name, self.logprob_mode, self.policy_id = engine.name, engine.logprob_mode, policy.policy_id
        self.takes_schemas = engine.takes_schemas
        self._engine = engine
        self._policy = policy
        self._loading = asyncio.Lock()

    @property
    def context_length(self) -> int:
        return self._engine.context_length

    @property
    def is_ready(self) -> bool:
        """Whether the policy is loaded."""
        return self._engine.policy_id == self._policy.policy_id

    def workers(self) -> list[tuple[str, bool]]:
        """Name of each worker, and whether it serves."""
        from stages.rollouts.engines.vllm import VllmEngine

        if isinstance(self._engine, VllmEngine):
            return [(worker.label, worker.policy is not None) for worker in self._engine.workers]
        return [(self.name, self.is_ready)]

    async def generate(self, request: GenerationRequest) -> Generation:
        asked = _asked.get()
        if asked.captured is not None:
            if not np.array_equal(request.prompt_ids, asked.captured.prompt_ids):
                raise Differs("its prompt is written otherwise now")
            return asked.captured.generation
        if not self.is_ready:
            await self._load_again()
        asked.request, asked.generation = request, await self._engine.generate(request)
        return asked.generation

    @asynccontextmanager
    async def at_home(self) -> AsyncIterator[None]:
        async with self._engine.at_home():
            yield

    async def _load_again(self) -> None:
        """Servers that were gone may have come back."""
        async with self._loading:
            if not self.is_ready:
                try:
                    await asyncio.to_thread(self._engine.load, self._policy)
                except RollmillError as error:
                    raise EngineFault(f"the policy is not served: {error.message}", hint=error.hint) from error

    def _load(self, policy: PolicyFiles) -> None:
        self._engine.load(policy)

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class Service:
    """What all sessions share."""

    engine: CapturedEngine
    template: ChatTemplate
    sampling: SamplingParams
    config: GatewayConfig
    mask: Masker


class CapturedSession:
    """The model calls of one episode, by trajectory."""

    def __init__(self, head: Head, path: Path, service: Service):
        self.head = head
        self.n_calls = 0
        """Those that were answered."""
        self.path = path
        self._log = SessionLog(path)
        self._service = service
        self._seed = head.seed
        self._sessions: dict[str, Session] = {}
        self._in_flight: dict[_Asked, str] = {}
        """By call: its trajectory."""
        self._is_ended = False

    @classmethod
    def begun(cls, head: Head, path: Path, service: Service) -> "CapturedSession":
        """A new one."""
        session = cls(head, path, service)
        session._log.begin(head)
        return session

    @classmethod
    async def resumed(cls, captured: Captured, path: Path, service: Service) -> tuple["CapturedSession", int]:
        """One that a killed gateway has left, and how many of its calls it cannot be continued from."""
        session = cls(captured.head, path, service)
        session._log = SessionLog(path, captured)
        session._seed = seed_from(captured.head.seed, len(captured.calls))
        n_different = 0
        for call in captured.calls:
            prompt = {"chat": None, "text": call.messages[0]["content"], "ids": call.prompt_ids}[call.form]
            again = ModelCall(call.messages, prompt, tools=call.tools, stop=call.stop)
            _asked.set(_Asked(captured=call))
            try:
                await session._session(call.trajectory).call(again)
            except RollmillError:
                n_different += 1
        session.n_calls = len(captured.calls)
        return session, n_different

    async def call(self, trajectory: str, call: ModelCall, teller: Teller | None = None) -> ModelAnswer:
        """Answers a call, once it is written down."""
        if self._is_ended:
            raise EpisodeClosed("the session has ended, so the policy is not asked any more")
        asked = _Asked(progress=Progress() if teller is None else teller.progress)
        _asked.set(asked)
        self._in_flight[asked] = trajectory
        try:
            answer = await self._session(trajectory).call(call, teller, asked.progress)
        except asyncio.CancelledError:
            self._abandoned(trajectory, asked)
            raise
        except Exception as error:
            partial = asked.progress.partial()
            self._failed(trajectory, asked.at, "refused", type(error).__name__, str(error), partial)
            raise
        finally:
            self._in_flight.pop(asked, None)
        assert asked.request is not None
        assert asked.generation is not None
        for retry in asked.generation.retries:
            told = f"{retry.worker}: {retry.message}"
            self._failed(trajectory, retry.started_at, "retried", retry.kind, told)
        self._log.call(trajectory, call, self._messages(call), asked.request, asked.generation, answer)
        self.n_calls += 1
        return answer

    def refused(self, trajectory: str, kind: str, message: str) -> None:
        """Notes a request that could not be made a call."""
        self._failed(trajectory, datetime.now(UTC), "refused", kind, message)

    def end(self, end: End) -> None:
        """No call is answered after this."""
        for asked, trajectory in self._in_flight.items():
            self._abandoned(trajectory, asked)
        self._is_ended = True
        self._log.end(end)

    def _abandoned(self, trajectory: str, asked: _Asked) -> None:
        self._failed(trajectory, asked.at, "abandoned", "CancelledError", _ABANDONED, asked.progress.partial())

    def _failed(
        self, trajectory: str, started_at: datetime, status: str, kind: str, message: str,
        partial: Partial | None = None,
    ) -> None:  # fmt: skip
        if not self._is_ended:
            told = self._service.mask(message)[:_MESSAGE_LIMIT]
            self._log.failed(FailedCall(trajectory, started_at, status, kind, told, partial))

    def _messages(self, call: ModelCall) -> Messages:
        if call.prompt is None:
            return call.messages
        text = call.prompt if isinstance(call.prompt, str) else self._service.template.decode_whole(call.prompt)
        return [{"role": "user", "content": text}]

    def _session(self, trajectory: str) -> Session:
        if trajectory not in self._sessions:
            service = self._service
            self._sessions[trajectory] = Session(
                trajectory,
                template=service.template,
                engine=service.engine,
                policy_id=service.engine.policy_id or "",
                sampling=service.sampling,
                max_turns=service.config.max_turns,
                seed=self._seed,
                uid=self.head.episode_id,
                agent_samples=service.config.agent_samples,
            )
        return self._sessions[trajectory]
