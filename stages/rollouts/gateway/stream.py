"""An answer as the events of a stream, written while it is sampled."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from stages.rollouts.calls import ModelAnswer
from stages.rollouts.engines.progress import NO_TOKENS, Tokens
from stages.rollouts.gateway.api import ApiError, Asked, Told
from stages.rollouts.telling import Piece

_NOTHING = (0, 0, 0)


class Stream(ABC):
    """The answers to one request. What has been said of each is counted, so that the rest is said at its end: all of
    it, where the engine does not tell an answer before it is whole."""

    def __init__(self, asked: Asked, told: Told):
        self._asked = asked
        self._told = told
        self._said: dict[int, tuple[int, int, int]] = {}
        """Characters of reasoning, characters of content, and tokens, by answer; those that have begun."""

    def piece(self, place: int, piece: Piece) -> Iterator[str]:
        """More of an answer."""
        yield from self._more(place, piece)
        reasoning, content, tokens = self._said.get(place, _NOTHING)
        self._said[place] = (
            reasoning + len(piece.reasoning),
            content + len(piece.content),
            tokens + len(piece.tokens[0]),
        )

    def end(self, answers: list[ModelAnswer]) -> Iterator[str]:
        """The rest of all answers, and how they ended."""
        for place, answer in enumerate(answers):
            reasoning, content, tokens = self._said.get(place, _NOTHING)
            sampled = tokens_of(answer) or NO_TOKENS
            rest = Piece(
                answer.prompt_tokens,
                (answer.reasoning or "")[reasoning:],
                answer.content[content:],
                (sampled[0][tokens:], sampled[1][tokens:]),
            )
            yield from self.piece(place, rest)
            yield from self._ended(place, answer)
        yield from self._closed(answers)

    @abstractmethod
    def broken(self, error: ApiError) -> str:
        """That there will be no more, and why."""

    @abstractmethod
    def _more(self, place: int, piece: Piece) -> Iterator[str]: ...

    @abstractmethod
    def _ended(self, place: int, answer: ModelAnswer) -> Iterator[str]: ...

    @abstractmethod
    def _closed(self, answers: list[ModelAnswer]) -> Iterator[str]: ...


def tokens_of(answer: ModelAnswer) -> Tokens | None:
    """None: they are not known."""
    if answer.response_ids is None or answer.logprobs is None:
        return None
    return answer.response_ids, answer.logprobs


def data_event(data: dict[str, Any]) -> str:
    """An event without a name."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def named_event(type: str, **fields: Any) -> str:
    """An event that says its type twice, as the newer APIs have it."""
    return f"event: {type}\ndata: {json.dumps({'type': type, **fields}, ensure_ascii=False)}\n\n"
