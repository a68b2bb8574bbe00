"""One model call as an agent makes it, whatever API it comes through, and its answer."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.rollouts.sdk import Messages


@dataclass(frozen=True)
class ModelCall:
    """What the policy is asked."""

    messages: Messages = field(default_factory=list)
    """All messages so far, as in the chat API."""
    prompt: str | np.ndarray | None = None
    """Text or ids (int32) that the policy continues as they are, instead of messages."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the policy may call, as in the chat API. None: none."""
    temperature: float | None = None
    """Wished by the agent, like the next four; None: the stage's. They count only where the config lets the agent
    choose."""
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends, whoever chooses the rest."""
    json_schema: str | None = None
    """JSON of the schema that the answer fits, whoever chooses the rest; None: it is any text."""
    choice: int = 0
    """Which of several answers to one request this is."""


@dataclass(frozen=True)
class ToolCall:
    """A function that the policy wants called."""

    id: str
    name: str
    arguments: str
    """JSON, as it was sampled."""

    def as_message_part(self) -> dict[str, Any]:
        """As in the chat API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ModelAnswer:
    """What the policy answered."""

    content: str
    """Without reasoning and tool calls."""
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """``stop``, ``length`` where the answer was cut, or ``tool_calls``."""
    stop_text: str | None
    """The one of the call's stop texts at which it ended; None: it did not end at one."""
    prompt_tokens: int | None
    """None: whoever answered does not say, as with the next three."""
    response_tokens: int | None
    response_ids: np.ndarray | None = field(repr=False)
    """int32, the sampled ids, stop token included."""
    logprobs: np.ndarray | None = field(repr=False)
    """float32, one for each sampled id."""

    @property
    def total_tokens(self) -> int | None:
        if self.prompt_tokens is None or self.response_tokens is None:
            return None
        return self.prompt_tokens + self.response_tokens

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be put at the end of the list for the next call."""
        calls = [call.as_message_part() for call in self.tool_calls]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})
