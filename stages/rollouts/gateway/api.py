"""What every API of the gateway does: it reads a request as a model call, and writes the answer in its own form."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stages.rollouts.calls import ModelAnswer, ModelCall


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
    def events(self, asked: Asked, answers: list[ModelAnswer], told: Told) -> Iterator[str]:
        """The answer as the events of a stream. All is known before the first is sent, so no stream breaks off half."""

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


def count_of(value: Any) -> int | None:
    """A number of things; others, such as the -1 that some clients send for no limit, are no wish."""
    return value if is_whole(value) and value > 0 else None


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
