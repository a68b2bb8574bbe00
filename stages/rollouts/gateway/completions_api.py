"""``/v1/completions``: prompts without a chat template, as text or as ids, as the older clients write them."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from stages.rollouts.calls import ModelAnswer, ModelCall
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
from stages.rollouts.gateway.chat_api import ChatApi

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
        return _head(told) | {"choices": _choices(asked, answers, told), "usage": _usage(asked, answers)}

    def events(self, asked: Asked, answers: list[ModelAnswer], told: Told) -> Iterator[str]:
        head = _head(told)
        for choice in _choices(asked, answers, told):
            yield f"data: {json.dumps(head | {'choices': [choice]}, ensure_ascii=False)}\n\n"
        if asked.with_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': _usage(asked, answers)})}\n\n"
        yield "data: [DONE]\n\n"


def _head(told: Told) -> dict[str, Any]:
    return {"id": f"cmpl-{told.uid}", "object": "text_completion", "created": int(time.time()), "model": told.model}


def _choices(asked: Asked, answers: list[ModelAnswer], told: Told) -> list[dict[str, Any]]:
    return [
        {
            "index": place,
            "text": answer.content,
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(answer, told.token_text) if asked.with_logprobs else None,
        }
        for place, answer in enumerate(answers)
    ]


def _usage(asked: Asked, answers: list[ModelAnswer]) -> dict[str, int] | None:
    prompts = [answer.prompt_tokens for answer in answers[:: asked.n]]
    return usage_of(prompts, [answer.response_tokens for answer in answers])


def _logprobs(answer: ModelAnswer, text_of: Callable[[int], str]) -> dict[str, Any] | None:
    if answer.response_ids is None or answer.logprobs is None:
        return None
    texts = list(map(text_of, answer.response_ids.tolist()))
    return {
        "tokens": texts,
        "token_logprobs": answer.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": [0, *accumulate(map(len, texts[:-1]))],
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
