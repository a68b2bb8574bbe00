"""``/v1/completions``: prompts without a chat template, as text or as ids, as the older clients write them."""

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from stages.rollouts.calls import ModelAnswer, ModelCall
from stages.rollouts.engines.progress import Tokens
from stages.rollouts.gateway.api import (
    MOST_CHOICES,
    ApiError,
    Asked,
    Told,
    count_of,
    is_whole,
    n_in,
    number_in,
    stops_in,
    usage_of,
    whole_in,
)
from stages.rollouts.gateway.chat_api import ChatApi, chat_refusal
from stages.rollouts.gateway.stream import Stream, data_event, tokens_of
from stages.rollouts.telling import Piece

_LARGEST_ID = 2**31 - 1


class CompletionsApi(ChatApi):
    """The completions API; it refuses as the chat API does."""

    path = "/v1/completions"

    def asked(self, body: dict[str, Any]) -> Asked:
        for field in ("echo", "suffix", "response_format"):
            if body.get(field):
                raise ApiError(400, f"{field} is not supported", param=field, code="unsupported")
        n = n_in(body)
        if body.get("best_of") not in (None, n):
            raise ApiError(400, "best_of: all answers are given, so it must be n", param="best_of", code="unsupported")
        logprobs = body.get("logprobs")
        if logprobs is not None and (not is_whole(logprobs) or not 0 <= logprobs <= 1):
            raise ApiError(
                400,
                "logprobs must be 0 or 1: only the logprob of the token that was sampled is known",
                param="logprobs",
                code="unsupported",
            )
        prompts = _prompts(body.get("prompt"))
        if n * len(prompts) > MOST_CHOICES:
            raise ApiError(400, f"a request may ask for {MOST_CHOICES} answers in all", param="prompt")
        first, *more = [
            ModelCall(
                prompt=prompt,
                temperature=number_in(body, "temperature", 0, 100),
                top_p=number_in(body, "top_p", 1e-9, 1),
                top_k=count_of(body.get("top_k")),
                max_tokens=count_of(body.get("max_tokens")),
                seed=whole_in(body, "seed"),
                stop=stops_in(body, "stop"),
            )
            for prompt in prompts
        ]
        options = body.get("stream_options") or {}
        return Asked(
            first,
            n,
            tuple(more),
            is_streamed=bool(body.get("stream")),
            with_usage=bool(options.get("include_usage")),
            with_logprobs=logprobs is not None,
        )

    def whole(self, asked: Asked, answers: list[ModelAnswer], told: Told) -> dict[str, Any]:
        choices = [
            {
                "index": place,
                "text": answer.content,
                "finish_reason": answer.finish_reason,
                "logprobs": _logprobs(tokens, told) if asked.with_logprobs and (tokens := tokens_of(answer)) else None,
            }
            for place, answer in enumerate(answers)
        ]
        return _head(told) | {"choices": choices, "usage": _usage(asked, answers)}

    def stream(self, asked: Asked, told: Told) -> Stream:
        return CompletionsStream(asked, told)


class CompletionsStream(Stream):
    """Chunks of the completions API."""

    def __init__(self, asked: Asked, told: Told):
        super().__init__(asked, told)
        self._head = _head(told)
        self._offsets: dict[int, int] = defaultdict(int)
        """Characters of the tokens that have been told, by answer."""

    def _more(self, place: int, piece: Piece) -> Iterator[str]:
        logprobs = None
        if self._asked.with_logprobs and len(piece.tokens[0]):
            logprobs = _logprobs(piece.tokens, self._told, self._offsets[place])
            self._offsets[place] += sum(map(len, logprobs["tokens"]))
        if piece.content or logprobs:
            yield self._event(place, piece.content, None, logprobs)

    def _ended(self, place: int, answer: ModelAnswer) -> Iterator[str]:
        yield self._event(place, "", answer.finish_reason, None)

    def _closed(self, answers: list[ModelAnswer]) -> Iterator[str]:
        if self._asked.with_usage:
            yield data_event(self._head | {"choices": [], "usage": _usage(self._asked, answers)})
        yield "data: [DONE]\n\n"

    def broken(self, error: ApiError) -> str:
        return data_event(chat_refusal(error))

    def _event(self, place: int, text: str, reason: str | None, logprobs: Any) -> str:
        choice = {"index": place, "text": text, "finish_reason": reason, "logprobs": logprobs}
        return data_event(self._head | {"choices": [choice]})


def _head(told: Told) -> dict[str, Any]:
    return {"id": f"cmpl-{told.uid}", "object": "text_completion", "created": int(time.time()), "model": told.model}


def _usage(asked: Asked, answers: list[ModelAnswer]) -> dict[str, int] | None:
    prompts = [answer.prompt_tokens for answer in answers[:: asked.n]]
    return usage_of(prompts, [answer.response_tokens for answer in answers])


def _logprobs(tokens: Tokens, told: Told, offset: int = 0) -> dict[str, Any]:
    """
    Args:
        offset: of the first token in the answer, in characters.
    """
    texts = list(map(told.token_text, tokens[0].tolist()))
    return {
        "tokens": texts,
        "token_logprobs": tokens[1].tolist(),
        "top_logprobs": None,
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=offset)],
    }


def _prompts(given: Any) -> list[str | np.ndarray]:
    """One or more: a text, a list of ids, or a list of either."""
    many = given if isinstance(given, list) and given and not is_whole(given[0]) else [given]
    return [_prompt(one, "prompt" if len(many) == 1 else f"prompt[{place}]") for place, one in enumerate(many)]


def _prompt(given: Any, where: str) -> str | np.ndarray:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(is_whole(token) and 0 <= token <= _LARGEST_ID for token in given):
        return np.array(given, dtype=np.int32)
    raise ApiError(400, f"{where} must be a text or a list of token ids, and not empty", param=where)
