"""What an agent is written with: the ``rollout`` decorator and the ``AgentConfig`` that every call gets.

Light on purpose: importing it needs neither torch nor transformers. The names follow rLLM's.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import Any, overload

from schemas.errors import RollmillError
from schemas.records import Task

Messages = list[dict[str, Any]]


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
        return self.calls.base_url(self.role)

    @property
    def api_key(self) -> str:
        """Opens this episode's ``base_url`` and no other's."""
        return self.calls.api_key

    async def chat(self, messages: Messages) -> Reply:
        """Asks the policy for the next message; for ``async`` agents.

        Args:
            messages: all messages so far, as in the chat API. Where they extend an earlier call of this trajectory and
                its answer, the policy continues from the exact tokens that it sampled.
        """
        return await self.calls.chat(self.role, messages)

    def chat_sync(self, messages: Messages) -> Reply:
        """Asks the policy for the next message; for agents that are plain functions."""
        return self.calls.chat_sync(self.role, messages)

    def for_role(self, role: str) -> "AgentConfig":
        """The same episode under another trajectory name, with a conversation and a reward of its own."""
        if not isinstance(role, str) or not 1 <= len(role) <= 128:
            raise ValueError(f"a role is a name of 1 to 128 characters, not {role!r}")
        return replace(self, role=role)


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
