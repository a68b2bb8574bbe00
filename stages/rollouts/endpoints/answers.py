"""What an endpoint has answered, read strictly: what it does not say is None, and what is no answer is refused."""

from dataclasses import dataclass
from typing import Any

from stages.rollouts.calls import ToolCall


class Nonsense(Exception):
    """It is no answer of the API; the message says why."""


@dataclass(frozen=True)
class Answer:
    """One answer."""

    content: str | None
    """None: no text."""
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int | None
    """As the endpoint counts; None: it does not say."""
    response_tokens: int | None


def chat_answer(told: dict[str, Any]) -> Answer:
    """Of ``/chat/completions``."""
    choice = _choice(told)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise Nonsense("its choice has no message")
    content = _text(message, "content")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Nonsense("its tool_calls are no list")
    reasoning = _text(message, "reasoning_content") or _text(message, "reasoning")
    return _answer(told, choice, content, reasoning, tuple(map(_tool_call, calls)))


def completion_answer(told: dict[str, Any]) -> Answer:
    """Of ``/completions``."""
    choice = _choice(told)
    return _answer(told, choice, _text(choice, "text"), None, ())


def _answer(
    told: dict[str, Any], choice: dict[str, Any], content: str | None, reasoning: str | None, calls: tuple[Any, ...]
) -> Answer:
    reason = choice.get("finish_reason")
    if not isinstance(reason, str):
        raise Nonsense("its choice has no finish_reason")
    usage = told.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Answer(content, reasoning, calls, reason, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _choice(told: dict[str, Any]) -> dict[str, Any]:
    choices = told.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise Nonsense("it does not have exactly one choice")
    return choices[0]


def _tool_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        uid, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
        if isinstance(uid, str) and isinstance(name, str) and isinstance(arguments, str):
            return ToolCall(uid, name, arguments)
    raise Nonsense("a tool call does not have an id, a name and arguments")


def _text(place: dict[str, Any], name: str) -> str | None:
    value = place.get(name)
    if value is not None and not isinstance(value, str):
        raise Nonsense(f"its {name} is no text")
    return value


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
