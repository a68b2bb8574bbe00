"""What every API of the gateway does: it reads a request as a model call, and writes the answer in its own form."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.rollouts.calls import ModelAnswer, ModelCall

if TYPE_CHECKING:
    from stages.rollouts.gateway.stream import Stream

MOST_CHOICES = 128
"""Answers to one request."""
_MOST_STOPS = 64
_LONGEST_STOP = 1000


class ApiError(Exception):
    """A call that is not answered.

    Args:
        status: of HTTP. Clients try 408, 409, 429 and 5xx again, and no others.
        code: what kind of refusal it is, for programs; None: none in particular.
        param: the field of the request that is wrong; None: none in particular.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


@dataclass(frozen=True)
class Asked:
    """A request that has been understood."""

    call: ModelCall
    n: int = 1
    more: tuple[ModelCall, ...] = ()
    """Further prompts of the same request, each to be answered ``n`` times, too."""
    is_streamed: bool = False
    with_usage: bool = False
    """At the end of a stream."""
    with_logprobs: bool = False


@dataclass(frozen=True)
class Told:
    """What an answer says beside the answer."""

    model: str
    uid: str
    """Of the answer."""
    token_text: Callable[[int], str]
    """How a token is written."""


class Api(ABC):
    """One API."""

    path: str

    @abstractmethod
    def asked(self, body: dict[str, Any]) -> Asked:
        """What a request asks for.

        Raises:
            ApiError: it is no such request, or asks for what the policy cannot do.
        """

    @abstractmethod
    def whole(self, asked: Asked, answers: list[ModelAnswer], told: Told) -> dict[str, Any]:
        """The answer as one object."""

    @abstractmethod
    def stream(self, asked: Asked, told: Told) -> "Stream":
        """What writes the answer as the events of a stream."""

    @abstractmethod
    def refusal(self, error: ApiError) -> dict[str, Any]:
        """The refusal as an object."""


def number_in(body: dict[str, Any], name: str, least: float, most: float) -> float | None:
    """A field that is a number within bounds; None: it is not set.

    Raises:
        ApiError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ApiError(400, f"{name} must be a number from {least:g} to {most:g}", param=name)
    return float(value)


def whole_in(body: dict[str, Any], name: str) -> int | None:
    """A field that is a whole number; None: it is not set.

    Raises:
        ApiError: it is something else.
    """
    value = body.get(name)
    if value is not None and not is_whole(value):
        raise ApiError(400, f"{name} must be a whole number", param=name)
    return value


def object_in(body: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that is an object; empty: it is not set.

    Raises:
        ApiError: it is something else.
    """
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be an object", param=name)
    return value


def n_in(body: dict[str, Any]) -> int:
    """How many answers are wanted.

    Raises:
        ApiError: none, or too many.
    """
    n = body.get("n")
    n = 1 if n is None else n
    if not is_whole(n) or not 1 <= n <= MOST_CHOICES:
        raise ApiError(400, f"n must be a whole number from 1 to {MOST_CHOICES}", param="n")
    return int(n)


def stops_in(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """A field that is a text before which an answer is to end, or a list of them.

    Raises:
        ApiError: it is something else.
    """
    value = body.get(name) or []
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(stop, str) and 1 <= len(stop) <= _LONGEST_STOP for stop in stops)
    ):
        raise ApiError(
            400,
            f"{name} must be a text of 1 to {_LONGEST_STOP:,} characters or a list of up to {_MOST_STOPS}",
            param=name,
        )
    return tuple(dict.fromkeys(stops))


def refuse_other_logprobs(body: dict[str, Any]) -> None:
    """Raises ApiError where logprobs of tokens are asked for that were not sampled."""
    if body.get("top_logprobs"):
        raise ApiError(
            400,
            "top_logprobs: only the logprob of the token that was sampled is known (logprobs)",
            param="top_logprobs",
            code="unsupported",
        )


def tools_in(body: dict[str, Any]) -> list[Any]:
    """The tools that a request has; what each is, is the API's own matter.

    Raises:
        ApiError: they are no list.
    """
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise ApiError(400, "tools must be a list", param="tools")
    return tools


def are_tools_offered(choice: Any, names: Collection[str], forced: Collection[str]) -> bool:
    """Whether the policy is shown the tools.

    Where it is to call a tool, or a certain one, it is shown them and decides by itself: what is sampled is its own.

    Args:
        choice: as the request has it.
        names: of the tools that the request has.
        forced: kinds of choice that name no tool and ask for a call all the same.

    Raises:
        ApiError: it is no choice, or one of a tool that the request does not have.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind is None or kind in ("auto", "none"):
        return bool(names) and kind != "none"
    if kind not in forced:
        function = choice.get("function", choice) if kind in ("function", "tool") and isinstance(choice, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                400,
                f"tool_choice must be auto, none, {' or '.join(forced)}, or name a tool",
                param="tool_choice",
            )
        if function["name"] not in names:
            raise ApiError(400, f"tool_choice: there is no tool {function['name']!r} in tools", param="tool_choice")
    if not names:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
    return True


def count_of(value: Any) -> int | None:
    """A number of things; others, such as the -1 that some clients send for no limit, are no wish."""
    return value if is_whole(value) and value > 0 else None


def usage_of(prompts: list[int | None], sampled: list[int | None]) -> dict[str, int] | None:
    """The tokens of some answers, as the older APIs tell them; None: not all are known."""
    known = [[count for count in counts if count is not None] for counts in (prompts, sampled)]
    if [len(counts) for counts in known] != [len(prompts), len(sampled)]:
        return None
    prompt, answer = map(sum, known)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
