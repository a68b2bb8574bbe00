"""The calls that are being sampled, as arrays with one row a call, so that a step costs no loop over them."""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from stages.rollouts.engines.base import Generation, GenerationRequest
from stages.rollouts.engines.progress import NO_TOKENS, Tokens
from stages.rollouts.engines.sampling import RowParams, uniforms
from stages.rollouts.engines.stopping import is_completed_by_last


@dataclass(eq=False)
class Call:
    """A model call that waits for its answer."""

    request: GenerationRequest
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    began: float = field(default_factory=time.perf_counter)
    done: "Future[Generation]" = field(default_factory=Future)

    @property
    def is_answered(self) -> bool:
        return self.done.done() and not self.done.cancelled() and self.done.exception() is None


class Batch:
    """The rows that are being sampled, as arrays; row ``i`` lives in slot ``i`` of the cache."""

    def __init__(self, n_slots: int):
        self.calls: list[Call] = []
        self.lengths = np.zeros(n_slots, dtype=np.int64)
        """Ids whose keys and values are in the slot: all but the last sampled one."""
        self._sampled = np.zeros(n_slots, dtype=np.int64)
        self._limits = np.zeros(n_slots, dtype=np.int64)
        self._temperature = np.ones(n_slots)
        self._top_p = np.ones(n_slots)
        self._top_k = np.zeros(n_slots, dtype=np.int64)
        self._stops = np.full((n_slots, 1), -1, dtype=np.int64)
        self._has_texts = np.zeros(n_slots, dtype=bool)
        """Whether the row may also end at a text."""
        self._is_followed = np.zeros(n_slots, dtype=bool)
        """Whether somebody reads along while the row is sampled."""
        self._stopped = np.zeros(n_slots, dtype=bool)
        self._ids = np.zeros((n_slots, 64), dtype=np.int32)
        self._logprobs = np.zeros((n_slots, 64), dtype=np.float32)
        self._uniforms = np.zeros((n_slots, 64))
        self._gate = threading.Lock()
        """Held while rows move or grow, as others may look at them."""

    @property
    def n(self) -> int:
        return len(self.calls)

    def add(self, calls: list[Call]) -> None:
        with self._gate:
            self._widen(max(call.request.sampling.max_tokens for call in calls))
        for row, call in enumerate(calls, start=self.n):
            sampling = call.request.sampling
            self.lengths[row] = len(call.request.prompt_ids) - 1
            self._sampled[row] = 0
            self._limits[row] = sampling.max_tokens
            self._temperature[row] = sampling.temperature
            self._top_p[row] = sampling.top_p
            self._top_k[row] = sampling.top_k or 0
            stops = sampling.stop_token_ids
            if len(stops) > self._stops.shape[1]:
                self._stops = np.pad(self._stops, ((0, 0), (0, len(stops) - self._stops.shape[1])), constant_values=-1)
            self._stops[row] = -1
            self._stops[row, : len(stops)] = stops
            self._has_texts[row], self._stopped[row] = bool(sampling.stop_texts), False
            progress = call.request.progress
            self._is_followed[row] = progress is not None and progress.is_followed
            if sampling.temperature > 0:
                self._uniforms[row, : sampling.max_tokens] = uniforms(call.request.seed, sampling.max_tokens)
        self.calls.extend(calls)

    def params(self, rows: np.ndarray) -> RowParams:
        return RowParams(self._temperature[rows], self._top_p[rows], self._top_k[rows])

    def next_uniforms(self, rows: np.ndarray) -> np.ndarray:
        return self._uniforms[rows, self._sampled[rows]]

    def last_ids(self) -> np.ndarray:
        rows = np.arange(self.n)
        return self._ids[rows, self._sampled[rows] - 1].astype(np.int64)

    def positions(self) -> np.ndarray:
        return self.lengths[: self.n].copy()

    def take(self, rows: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Appends a sampled token to each row; returns which of them are finished."""
        places = self._sampled[rows]
        self._ids[rows, places] = ids
        self._logprobs[rows, places] = logprobs
        self._sampled[rows] += 1  # after the two above, so that who looks meanwhile sees whole tokens
        self.lengths[rows] += 1
        self._stopped[rows] = (self._stops[rows] == ids[:, None]).any(1)
        for row in rows[self._has_texts[rows] & ~self._stopped[rows]].tolist():
            self._stopped[row] = self._ends_at_text(row)
        for row in rows[self._is_followed[rows]].tolist():
            progress = self.calls[row].request.progress
            assert progress is not None
            progress.more()
        finished: np.ndarray = self._stopped[rows] | (self._sampled[rows] >= self._limits[rows])
        return finished

    def answer(self, row: int, policy_id: str, worker: str) -> None:
        """Answers the row's call, unless it was cancelled meanwhile."""
        call, n = self.calls[row], int(self._sampled[row])
        if not call.done.set_running_or_notify_cancel():
            return
        call.done.set_result(
            Generation(
                response_ids=self._ids[row, :n].copy(),
                logprobs=self._logprobs[row, :n].copy(),
                finish_reason="stop" if self._stopped[row] else "length",
                policy_id=policy_id,
                worker=worker,
                started_at=call.started_at,
                latency_s=time.perf_counter() - call.began,
            )
        )

    def remove(self, row: int) -> None:
        """Takes a row out; the last one moves to its place."""
        last = self.n - 1
        with self._gate:
            for array in (
                self.lengths, self._sampled, self._limits, self._temperature, self._top_p, self._top_k, self._stops,
                self._has_texts, self._is_followed, self._stopped, self._ids, self._logprobs, self._uniforms,
            ):  # fmt: skip
                array[row] = array[last]
            self.calls[row] = self.calls[last]
            self.calls.pop()

    def sampled_of(self, call: Call) -> Tokens:
        """What has been sampled for a call so far, asked from any thread; nothing where it has not entered yet."""
        with self._gate:
            if call.is_answered:  # and so no row any more, or not for long
                generation = call.done.result()
                return generation.response_ids, generation.logprobs
            if call not in self.calls:
                return NO_TOKENS
            row = self.calls.index(call)
            n = int(self._sampled[row])
            return self._ids[row, :n].copy(), self._logprobs[row, :n].copy()

    def _ends_at_text(self, row: int) -> bool:
        request = self.calls[row].request
        assert request.text_of is not None
        ids = self._ids[row, : self._sampled[row]]
        return is_completed_by_last(ids, request.sampling.stop_texts, request.text_of)

    def _widen(self, max_tokens: int) -> None:
        more = max_tokens - self._ids.shape[1]
        if more > 0:
            self._ids = np.pad(self._ids, ((0, 0), (0, more)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more)))
            self._uniforms = np.pad(self._uniforms, ((0, 0), (0, more)))
