"""The in-process engine: a Hugging Face model on the CPU or one GPU, with continuous batching.

One thread does all work with the model. Calls queue up and join the running batch whenever slots are
free; a prompt that several waiting calls share is computed once; a finished row leaves at once.
"""

import asyncio
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from schemas.errors import InputError, StageFailed
from stages.rollouts.checkpoint import context_length_of
from stages.rollouts.engines.adapter import Adapter
from stages.rollouts.engines.base import (
    Engine,
    EngineFault,
    Generation,
    GenerationRequest,
    PolicyFiles,
    probe_error,
    refuse_probe,
)
from stages.rollouts.engines.batch import Batch, Call
from stages.rollouts.engines.sampling import sample
from stages.rollouts.engines.slots import ATTENTION, SlotCache

_PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass at most (more only for a single longer prompt)."""
_GATHER_S = 0.002
"""How long an idle engine waits for more calls after the last one came, before it begins."""
_DECODED_PROBE_TOKENS = 8
"""Trailing tokens of each probe sequence that are also checked one by one."""


class TransformersEngine(Engine):
    """Sampling with a model in this process."""

    name = "transformers"
    logprob_mode = "raw"

    def __init__(
        self,
        *,
        dtype: str,
        device: str,
        threads: int | None,
        max_batch: int,
        probe_tolerance: float,
    ):
        super().__init__()
        self._dtype = getattr(torch, dtype)
        self._device = torch.device(_device(device))
        self._threads = threads
        self._max_batch = max_batch
        self._tolerance = probe_tolerance
        self._model: Any = None
        self._folder: Path | None = None
        """Of the model's weights."""
        self._adapter: Adapter | None = None
        self._cache = SlotCache(max_batch)
        self._context_length: int | None = None
        self._batch = Batch(max_batch)
        self._waiting: list[Call] = []
        self._entering: list[Call] = []
        """Calls whose prompt is being computed."""
        self._inbox: queue.SimpleQueue[Call | _LoadOrder | None] = queue.SimpleQueue()
        self._order: _LoadOrder | None = None
        self._gate = threading.Lock()
        self._open = True
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollmill-transformers-engine", daemon=True)
        self._thread.start()

    @property
    def context_length(self) -> int:
        if self._context_length is None:
            raise EngineFault("engine transformers: no policy is loaded")
        return self._context_length

    @property
    def broken(self) -> bool:
        return not self._open

    def _load(self, policy: PolicyFiles) -> None:
        order = _LoadOrder(policy)
        self._put(order)
        order.done.result()

    async def generate(self, request: GenerationRequest) -> Generation:
        call = Call(request)
        progress = request.progress
        if progress is not None:
            progress.begin(partial(self._batch.sampled_of, call))
        self._put(call)
        try:
            return await asyncio.shield(asyncio.wrap_future(call.done))
        except asyncio.CancelledError:
            if progress is not None:
                progress.freeze()  # before the row leaves, which it does once the call is cancelled
            call.done.cancel()
            raise

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _put(self, item: "Call | _LoadOrder") -> None:
        with self._gate:
            if not self._open:
                raise self._stopped()
            self._inbox.put(item)

    def _stopped(self) -> EngineFault:
        fault = EngineFault(f"engine transformers has stopped: {self._fault or 'it was closed'}")
        fault.__cause__ = self._fault
        return fault

    # Everything below runs in the engine's own thread.

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._receive():
                    self._admit()
                    self._step()
        except BaseException as error:
            self._fault = error
        self._fail_all()

    def _receive(self) -> bool:
        """Takes what has come in; waits where there is nothing to do. False: the engine is closed.

        A policy is loaded when all calls that came before the order are answered; until then nothing more is taken.
        """
        wait_s = 0.0 if self._batch.n or self._waiting else None
        while self._order is None:
            try:
                item = self._inbox.get(wait_s != 0, wait_s)
            except queue.Empty:
                break
            if item is None:
                return False
            if isinstance(item, Call):
                self._waiting.append(item)
            else:
                self._order = item
            wait_s = 0.0 if self._batch.n else _GATHER_S
        if self._order is not None and not self._batch.n and not self._waiting:
            order, self._order = self._order, None
            try:
                self._take_policy(order.policy)
                order.done.set_result(None)
            except BaseException as error:
                self._model = None
                order.done.set_exception(error)
        return True

    def _admit(self) -> None:
        self._waiting = [call for call in self._waiting if not call.done.cancelled()]
        free = self._max_batch - self._batch.n
        enough = min(len(self._waiting), max(1, self._max_batch // 8))
        if not self._waiting or free < enough:
            return
        self._entering, self._waiting = self._waiting[:free], self._waiting[free:]
        by_prompt: dict[bytes, list[Call]] = {}
        for call in self._entering:
            by_prompt.setdefault(call.request.prompt_ids.tobytes(), []).append(call)
        groups = sorted(by_prompt.values(), key=lambda group: len(group[0].request.prompt_ids))
        while groups:
            n = 1
            while n < len(groups) and (n + 1) * len(groups[n][0].request.prompt_ids) <= _PREFILL_TOKENS:
                n += 1
            self._prefill(groups[:n])
            groups = groups[n:]
        self._entering = []

    def _prefill(self, groups: list[list[Call]]) -> None:
        prompts = [group[0].request.prompt_ids for group in groups]
        rows = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        logits = self._prompt_logits(prompts, rows, first_slot=self._batch.n)
        first = self._batch.n
        self._batch.add([call for group in groups for call in group])
        self._choose(logits[torch.from_numpy(rows).to(logits.device)], first)

    def _step(self) -> None:
        self._leave(np.array([call.done.cancelled() for call in self._batch.calls], dtype=bool))
        if self._batch.n:
            self._choose(self._next_logits(self._batch.last_ids(), self._batch.positions()), 0)

    def _choose(self, logits: torch.Tensor, first: int) -> None:
        """Samples the next token of each row from ``first`` on, and lets those leave that are finished."""
        batch = self._batch
        rows = np.arange(first, batch.n)
        ids, logprobs = sample(logits, batch.next_uniforms(rows), batch.params(rows))
        finished = np.zeros(batch.n, dtype=bool)
        finished[rows] = batch.take(rows, ids, logprobs)
        self._leave(finished)

    def _leave(self, leaving: np.ndarray) -> None:
        for row in np.flatnonzero(leaving)[::-1].tolist():
            self._batch.answer(row, self.policy_id or "", f"{self.name}:{self._device}")
            if (last := self._batch.n - 1) != row:
                self._cache.move(last, row, int(self._batch.lengths[last]))
            self._batch.remove(row)

    def _prompt_logits(self, prompts: list[np.ndarray], rows: np.ndarray, first_slot: int) -> torch.Tensor:
        """Logits after each prompt, whose keys and values fill the slots from ``first_slot`` on."""
        lengths = np.array([len(prompt) for prompt in prompts])
        ids = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        self._cache.start_prefill(self._tensor(rows), first_slot, ids.shape[1])
        return self._forward(ids, np.arange(ids.shape[1])[None], self._tensor(lengths[:, None] - 1))[:, 0]

    def _next_logits(self, ids: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        self._cache.start_decode(self._tensor(positions), int(positions.max()) + 1)
        return self._forward(ids[:, None], positions[:, None], 1)[:, -1]

    def _forward(self, ids: np.ndarray, positions: np.ndarray, keep: "torch.Tensor | int") -> torch.Tensor:
        found: torch.Tensor = self._model(
            input_ids=self._tensor(ids),
            position_ids=self._tensor(positions),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return found

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _take_policy(self, policy: PolicyFiles) -> None:
        self._context_length = context_length_of(policy.folder)
        self._put_on_model(policy)
        self._cache = SlotCache(self._max_batch)
        in_one_pass = [self._sequence_logprobs(ids) for ids in policy.probe.ids]
        decoded = [self._decoded_logprobs(ids) for ids in policy.probe.ids]
        with_tails = [
            np.concatenate([whole[: len(whole) - len(tail)], tail])
            for whole, tail in zip(in_one_pass, decoded, strict=True)
        ]
        error = max(probe_error(found, policy.probe) for found in (in_one_pass, with_tails))
        refuse_probe(self.name, policy, error, self._tolerance)

    def _put_on_model(self, policy: PolicyFiles) -> None:
        """Loads what is not there yet: an adapter and its base, or two adapters of one, share their weights."""
        if self._adapter is not None:
            self._adapter.remove()
        self._adapter = None
        if self._model is None or self._folder != policy.folder:
            self._model = None  # frees the memory first
            self._model = _loaded_model(policy.folder, self._dtype).to(self._device).eval()
            self._folder = policy.folder
        if policy.adapter is not None:
            self._adapter = Adapter(self._model, policy.adapter)

    def _sequence_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Of ``ids[1:]``, each after all before it, in one pass."""
        self._cache.start_prefill(self._tensor(np.zeros(1, dtype=np.int64)), 0, len(ids))
        logits = self._forward(ids[None].astype(np.int64), np.arange(len(ids))[None], 0)[0, :-1]
        return _logprobs_of(logits, self._tensor(ids[1:].astype(np.int64)))

    def _decoded_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Of the last few ids, computed as when sampling: a prompt first, then token by token."""
        n = min(_DECODED_PROBE_TOKENS, len(ids) - 1)
        logits = [self._prompt_logits([ids[:-n]], np.zeros(1, dtype=np.int64), 0)]
        logits += [
            self._next_logits(ids[place : place + 1].astype(np.int64), np.array([place]))
            for place in range(len(ids) - n, len(ids) - 1)
        ]
        return _logprobs_of(torch.cat(logits), self._tensor(ids[-n:].astype(np.int64)))

    def _fail_all(self) -> None:
        with self._gate:
            self._open = False
        left: list[Call | _LoadOrder | None] = [*self._batch.calls, *self._entering, *self._waiting, self._order]
        while not self._inbox.empty():
            left.append(self._inbox.get())
        for item in left:
            if item is not None and not item.done.done() and item.done.set_running_or_notify_cancel():
                item.done.set_exception(self._stopped())
        self._model, self._batch = None, Batch(self._max_batch)
        self._waiting, self._entering = [], []
        self._cache = SlotCache(self._max_batch)


@dataclass(eq=False)
class _LoadOrder:
    policy: PolicyFiles
    done: "Future[None]" = field(default_factory=Future)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _loaded_model(folder: Path, dtype: torch.dtype) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    transformers_logging.disable_progress_bar()
    try:
        model, report = load(
            folder, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"the policy in {folder} cannot be loaded: {error}") from error
    wrong = {name: report[name] for name in ("missing_keys", "mismatched_keys", "error_msgs") if report.get(name)}
    if wrong:
        raise StageFailed(f"the policy in {folder} did not load as stored: {wrong}")
    return model


def _logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    found = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return found.float().cpu().numpy()
