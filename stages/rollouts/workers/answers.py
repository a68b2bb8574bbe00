"""What is believed of a server's answer: nothing, until every id and every logprob is there and fits. What is missing
is never filled in."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.rollouts.engines.base import FinishReason, GenerationRequest
from stages.rollouts.engines.progress import Tokens
from stages.rollouts.workers.dialects import Told, UnusableAnswer

_NO_PROBABILITY = -9999.0
"""What vLLM writes where a logprob is minus infinity."""
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Answer:
    """Sampled ids (int32), one logprob each (float32), and why sampling ended."""

    response_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason


def sampling_of(request: GenerationRequest) -> dict[str, Any]:
    """What a server is to do, with everything said that it might have its own default for."""
    sampling = request.sampling
    texts = {"stop": list(sampling.stop_texts), "include_stop_str_in_output": True} if sampling.stop_texts else {}
    form = {} if sampling.json_schema is None else {"structured_outputs": {"json": sampling.json_schema}}
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed & (2**63 - 1),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are all named above
        "logprobs": 0,  # of the sampled token, and no other
        **texts,
        **form,
    }


def sampled(told: Told, request: GenerationRequest, vocabulary: int) -> Answer:
    """The answer to ``sampling_of(request)``.

    Raises:
        UnusableAnswer: with what is wrong with it.
    """
    if not _same(_ids(told.prompt_ids, "prompt ids"), request.prompt_ids):
        raise UnusableAnswer("it has read another prompt than it was given")
    ids = _ids(told.ids, "sampled ids")
    sampling, reason = request.sampling, told.finish_reason
    if not 0 < len(ids) <= sampling.max_tokens:
        raise UnusableAnswer(f"it has sampled {len(ids)} tokens, and 1 to {sampling.max_tokens} were asked for")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise UnusableAnswer(f"an id is outside the vocabulary of {vocabulary}")
    stops = np.flatnonzero(np.isin(ids, sampling.stop_token_ids))
    is_full, is_stopped = len(ids) == sampling.max_tokens, stops.tolist() == [len(ids) - 1]
    # Not looked for in the answer: after a prompt that ends inside a character, vLLM may also find it across the two.
    is_at_text = bool(sampling.stop_texts) and reason == "stop" and not len(stops)
    if not (reason == "stop" and (is_stopped or is_at_text)) and not (
        reason == "length" and is_full and (is_stopped or not len(stops))
    ):
        raise UnusableAnswer(f"it says that it ended by {reason!r}, and its {len(ids)} ids do not")
    ends: FinishReason = "stop" if is_stopped or is_at_text else "length"
    return Answer(ids.astype(np.int32), _logprobs(told, ids), ends)


def part_of(told: Told, vocabulary: int) -> Tokens:
    """The tokens in a part of an answer, which is not whole yet.

    Raises:
        UnusableAnswer: they are none.
    """
    ids = _ids(told.ids, "sampled ids")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise UnusableAnswer(f"an id is outside the vocabulary of {vocabulary}")
    return ids.astype(np.int32), _logprobs(told, ids)


def whole_of(parts: list[Told]) -> Told:
    """An answer of which each part has been looked at."""
    first, reasons = parts[0] if parts else Told(), [part.finish_reason for part in parts]
    return Told(
        prompt_ids=first.prompt_ids,
        ids=[token for part in parts for token in part.ids or []],
        logprobs=[logprob for part in parts for logprob in part.logprobs or []],
        owners=[token for part in parts for token in part.owners or []],
        finish_reason=next((reason for reason in reversed(reasons) if reason is not None), None),
    )


def prompt_logprobs(told: Told, ids: np.ndarray) -> np.ndarray:
    """The logprobs of ``ids[1:]`` in the answer to a request for those of its prompt.

    Raises:
        UnusableAnswer: one is missing.
    """
    try:
        _, *given = told.prompt_logprobs
        found = [one[str(token)]["logprob"] for one, token in zip(given, ids[1:].tolist(), strict=True)]
        return np.array(found, dtype=np.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableAnswer("it does not tell the logprobs of its prompt") from error


def forced_logprob(told: Told, token: int) -> float:
    """The logprob of the one token that the answer was allowed to be.

    Raises:
        UnusableAnswer: it is another one, or it has no logprob.
    """
    ids = _ids(told.ids, "sampled ids")
    if ids.tolist() != [token]:
        raise UnusableAnswer("it has sampled a token that was ruled out")
    return float(_logprobs(told, ids)[0])


def _ids(values: Any, what: str) -> np.ndarray:
    array = _array(values, what)
    if set(map(type, values)) != {int} or array.dtype != np.int64:  # true and false would pass for numbers
        raise UnusableAnswer(f"its {what} are no whole numbers")
    return array


def _array(values: Any, what: str) -> np.ndarray:
    if not isinstance(values, list) or not values:
        raise UnusableAnswer(f"it has no {what}")
    try:
        array = np.array(values)
    except (ValueError, OverflowError) as error:
        raise UnusableAnswer(f"its {what} are no numbers") from error
    if array.ndim != 1:
        raise UnusableAnswer(f"its {what} are no list of numbers")
    return array


def _logprobs(told: Told, ids: np.ndarray) -> np.ndarray:
    """The logprobs, each shown to belong to the id that was sampled."""
    found = _array(told.logprobs, "logprobs")
    if len(found) != len(ids):
        raise UnusableAnswer(f"it has {len(found)} logprobs for {len(ids)} sampled tokens")
    if not np.issubdtype(found.dtype, np.floating) and not np.issubdtype(found.dtype, np.integer):
        raise UnusableAnswer("a logprob is missing")
    if not (np.isfinite(found) & (found <= _ROUNDING) & (found > _NO_PROBABILITY)).all():
        raise UnusableAnswer("a logprob is that of no sampled token")
    if not _same(_ids(told.owners, "logprobs' ids"), ids):
        raise UnusableAnswer("its logprobs belong to other tokens than it has sampled")
    return found.astype(np.float32)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return len(a) == len(b) and bool((a == b).all())
