"""An engine without a model: its answers are told by a function. For tests, and for measuring all but sampling."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import numpy as np

from stages.rollouts.checkpoint import context_length_of, model_config
from stages.rollouts.engines.base import Engine, Generation, GenerationRequest, PolicyFiles
from stages.rollouts.engines.stopping import n_until_stop

Script = Callable[[GenerationRequest, int], "Sequence[int] | np.ndarray"]
"""Given the call and the size of the vocabulary, the ids of the answer."""


class ScriptedEngine(Engine):
    """Answers as the script says, cut at ``max_tokens`` and after a stop token or text.

    The logprobs are those of a policy that is uniform over the vocabulary.
    """

    name = "scripted"
    logprob_mode = "raw"

    def __init__(self, script: Script):
        super().__init__()
        self._script = script
        self._context_length = 0
        self._vocabulary = 1

    @property
    def context_length(self) -> int:
        return self._context_length

    def _load(self, policy: PolicyFiles) -> None:
        self._context_length = context_length_of(policy.folder)
        self._vocabulary = model_config(policy.folder)["vocab_size"]

    async def generate(self, request: GenerationRequest) -> Generation:
        started_at, began = datetime.now(UTC), time.perf_counter()
        sampling = request.sampling
        ids = np.asarray(self._script(request, self._vocabulary), dtype=np.int32)[: sampling.max_tokens]
        stops = np.flatnonzero(np.isin(ids, sampling.stop_token_ids))
        if len(stops):
            ids = ids[: stops[0] + 1]
        texts, is_stopped = sampling.stop_texts, bool(len(stops))
        if texts and request.text_of is not None and (n := n_until_stop(ids, texts, request.text_of)) is not None:
            ids, is_stopped = ids[:n], True
        return Generation(
            response_ids=ids,
            logprobs=np.full(len(ids), -np.log(self._vocabulary), dtype=np.float32),
            finish_reason="stop" if is_stopped else "length",
            policy_id=self.policy_id or "",
            worker=self.name,
            started_at=started_at,
            latency_s=time.perf_counter() - began,
        )

    def close(self) -> None:
        """Nothing to end."""


def replies_by_seed(replies: Sequence[Sequence[int]]) -> Script:
    """One of the replies, by the call's seed."""
    return lambda request, vocabulary: replies[request.seed % len(replies)]


def drawn_ids(n_tokens: int) -> Script:
    """Ids drawn uniformly from the vocabulary by the call's seed."""

    def script(request: GenerationRequest, vocabulary: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(key=request.seed)).integers(vocabulary, size=n_tokens)

    return script
