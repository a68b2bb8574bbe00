"""What an agent is written with: the ``rollout`` decorator and the ``AgentConfig`` that every call gets.

Light on purpose: importing it needs neither torch nor transformers. The names follow rLLM's.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from types import MappingProxyType
from typing import Any, overload

from schemas.errors import RollmillError
from schemas.records import Task

Messages = list[dict[str, Any]]
ROLE_HEADER = "X-Rollmill-Role"
"""Of a request over HTTP: the trajectory to which it belongs, whatever its address says."""
_BLOCKS: ContextVar[Mapping[tuple[str, str], str]] = ContextVar("rollmill_roles", default=MappingProxyType({}))
"""The role of the ``as_role`` block that runs now, by episode and by the role outside of it."""


class MaxTurnsReached(RollmillError):
    """The trajectory has made all the model calls that it may; the episode ends with status ``max_turns``."""


class EpisodeClosed(RollmillError):
    """The episode has ended (by its time limit), so the policy is not asked any more."""


@dataclass(frozen=True)
class Reply:
    """What the policy answered."""

    text: str
    finish_reason: str
    """``stop``, or ``length`` where the answer was cut."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be put at the end of the list for the next call."""
        return self.message_of(self.text)

    @staticmethod
    def message_of(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}


class ModelCalls(ABC):
    """The way from an agent to the policy; the rollouts stage provides it."""

    @abstractmethod
    async def chat(self, trajectory: str, messages: Messages) -> Reply:
        """Asks the policy, in the stage's event loop."""

    @abstractmethod
    def chat_sync(self, trajectory: str, messages: Messages) -> Reply:
        """Asks the policy from another thread, and waits."""

    @abstractmethod
    def base_url(self, trajectory: str) -> str:
        """Where a client of the chat API asks it over HTTP."""

    @property
    @abstractmethod
    def api_key(self) -> str:
        """What the client must send with it."""


@dataclass(frozen=True)
class AgentConfig:
    """What an agent knows of the attempt that it makes."""

    model: str
    """Name of the policy."""
    session_uid: str
    """Id of the episode."""
    sampling_params: dict[str, Any]
    """How the policy samples; for information: the stage's settings decide."""
    is_validation: bool
    """Whether the episode is for evaluation and not for training."""
    metadata: dict[str, Any]
    """The stage's ``agent_config``."""
    seed: int
    """Seed of the episode, for an agent that draws random numbers itself."""
    role: str
    """Name of the trajectory to which calls through this object belong."""
    calls: ModelCalls = field(repr=False)

    @property
    def base_url(self) -> str:
        """For clients of the chat API, such as ``OpenAI(base_url=config.base_url, api_key=config.api_key)``: calls made
        there are recorded as this trajectory's."""
        return self.calls.base_url(self.current_role)

    @property
    def api_key(self) -> str:
        """Opens this episode's ``base_url`` and no other's."""
        return self.calls.api_key

    @property
    def current_role(self) -> str:
        """The trajectory of a call that is made now: ``role``, or that of the ``as_role`` block around it."""
        return _BLOCKS.get().get((self.session_uid, self.role), self.role)

    @property
    def headers(self) -> dict[str, str]:
        """What makes a request the current role's, whatever base URL its client was made with:
        ``client.chat.completions.create(…, extra_headers=config.headers)``."""
        return {ROLE_HEADER: self.current_role}

    async def chat(self, messages: Messages) -> Reply:
        """Asks the policy for the next message; for ``async`` agents.

        Args:
            messages: all messages so far, as in the chat API. Where they extend an earlier call of this trajectory and
                its answer, the policy continues from the exact tokens that it sampled.
        """
        return await self.calls.chat(self.current_role, messages)

    def chat_sync(self, messages: Messages) -> Reply:
        """Asks the policy for the next message; for agents that are plain functions."""
        return self.calls.chat_sync(self.current_role, messages)

    def for_role(self, role: str) -> "AgentConfig":
        """The same episode under another trajectory name, with a conversation and a reward of its own."""
        if not isinstance(role, str) or not 1 <= len(role) <= 128:
            raise ValueError(f"a role is a name of 1 to 128 characters, not {role!r}")
        return replace(self, role=role)

    @contextmanager
    def as_role(self, role: str) -> Iterator["AgentConfig"]:
        """Inside the block, calls through this object (``chat``, ``chat_sync``, and clients that are given its
        ``headers`` or ``base_url`` there) belong to another trajectory.

        Tasks of asyncio that are started inside belong to it, too; threads do not: give them ``for_role``.
        """
        other = self.for_role(role)
        token = _BLOCKS.set({**_BLOCKS.get(), (self.session_uid, self.role): role})
        try:
            yield other
        finally:
            _BLOCKS.reset(token)


AgentFunction = Callable[[Task, AgentConfig], Any]


class Agent:
    """A function ``(task, config) -> Episode | Trajectory | list[Trajectory] | dict | str | None``, sync or async."""

    def __init__(self, function: AgentFunction, name: str = "default"):
        update_wrapper(self, function)
        self.function = function
        self.name = name
        """Name of the trajectory of calls through ``config`` itself."""
        self.is_async = inspect.iscoroutinefunction(function)

    def __call__(self, task: Task, config: AgentConfig) -> Any:
        return self.function(task, config)


@overload
def rollout(function: AgentFunction, /) -> Agent: ...
@overload
def rollout(*, name: str = "default") -> Callable[[AgentFunction], Agent]: ...
def rollout(function: AgentFunction | None = None, /, *, name: str = "default") -> Any:
    """Makes a function an agent.

    A string that it returns is recorded as the artifact ``answer``, a dict as the artifacts, and None is legal: the
    recorded model calls are what counts.

    Args:
        name: name of the agent's trajectory.
    """
    if function is not None:
        return Agent(function, name)
    return lambda decorated: Agent(decorated, name)
