"""The two APIs of vLLM's server that take and give token ids: the token API, which need not make text, and the
completions API of servers that have no other.

Here is only how they write things; what is believed of them, ``answers`` says.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import orjson

_MARK = "token_id:"


class UnusableAnswer(Exception):
    """A server's answer that is not an answer to what was asked."""


@dataclass(frozen=True)
class Told:
    """What an answer says, of any type, as none of it is believed yet. None: it says nothing of this."""

    prompt_ids: Any = None
    ids: Any = None
    """Sampled."""
    logprobs: Any = None
    """One for each of ``ids``."""
    owners: Any = None
    """The id that each of ``logprobs`` belongs to."""
    finish_reason: Any = None
    prompt_logprobs: Any = None
    """A mapping from id, as text, to its logprob for each id of the prompt; None for the first."""


class Dialect(ABC):
    """One API."""

    path: str

    @abstractmethod
    def body(self, prompt: "list[int] | np.ndarray", sampling: dict[str, Any]) -> dict[str, Any]:
        """A request for one answer, without the model's name; ``sampling`` is named as in vLLM's SamplingParams."""

    @abstractmethod
    def _told(self, whole: dict[str, Any], choice: dict[str, Any]) -> Told:
        """The same of an answer with one choice."""

    def read(self, body: bytes) -> Told:
        """What an answer says.

        Raises:
            UnusableAnswer: it has another form.
        """
        try:
            whole = orjson.loads(body)
            (choice,) = whole["choices"]
            return self._told(whole, choice)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnusableAnswer(f"it is no answer with one choice, its ids and logprobs: {body[:80]!r}") from error


class TokenApi(Dialect):
    """``/inference/v1/generate``: no text is made, which takes a third of the server's time, unless one is to end the
    answer."""

    path = "/inference/v1/generate"

    def body(self, prompt: "list[int] | np.ndarray", sampling: dict[str, Any]) -> dict[str, Any]:
        as_text = {"detokenize": "stop" in sampling}
        return {"token_ids": prompt, "return_token_ids": True, "sampling_params": sampling | as_text}

    def _told(self, whole: dict[str, Any], choice: dict[str, Any]) -> Told:
        content = (choice.get("logprobs") or {}).get("content")
        return Told(
            prompt_ids=whole.get("prompt_token_ids"),
            ids=choice.get("token_ids"),
            logprobs=None if content is None else list(map(itemgetter("logprob"), content)),
            owners=None if content is None else list(map(itemgetter("token_id"), content)),
            finish_reason=choice.get("finish_reason"),
            prompt_logprobs=whole.get("prompt_logprobs"),
        )


class CompletionsApi(Dialect):
    """``/v1/completions``, made to tell ids."""

    path = "/v1/completions"

    def body(self, prompt: "list[int] | np.ndarray", sampling: dict[str, Any]) -> dict[str, Any]:
        wanted = {"return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False}
        return {"prompt": prompt} | wanted | sampling

    def _told(self, whole: dict[str, Any], choice: dict[str, Any]) -> Told:
        logprobs = choice.get("logprobs") or {}
        names = logprobs.get("tokens")
        return Told(
            prompt_ids=choice.get("prompt_token_ids"),
            ids=choice.get("token_ids"),
            logprobs=logprobs.get("token_logprobs"),
            owners=list(map(int, ",".join(names).replace(_MARK, "").split(","))) if names else names,
            finish_reason=choice.get("finish_reason"),
            prompt_logprobs=choice.get("prompt_logprobs"),
        )


DIALECTS: tuple[Dialect, ...] = (TokenApi(), CompletionsApi())
"""The better one first."""
