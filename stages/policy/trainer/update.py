"""One training: optimizer steps over packed sequences, with sums over all processes behind every number."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from schemas.errors import StageFailed
from stages.policy import aggregation, losses
from stages.policy.kl import ESTIMATORS, k1, k3
from stages.policy.packing import pack
from stages.policy.schedule import lr_at
from stages.policy.sequences import Sequences, plain_sequences, ranges
from stages.policy.trainer.agreement import agreement, refuse_beyond
from stages.policy.trainer.forward import Row, entropies_of, logprobs_of, row_of, sampled_logits
from stages.policy.trainer.job import Job
from stages.policy.trainer.learner import Learner

Progress = Callable[[int, int], None]


def train(
    learner: Learner, reference: Any, job: Job, batch: Sequences, steps: list[np.ndarray], progress: Progress
) -> dict[str, float]:
    """Takes every step; returns the measurements.

    Args:
        reference: the model that the penalty measures against; None: none is needed.
        steps: numbers of the sequences of each optimizer step.
    """
    started = time.perf_counter()
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    sums, first = Sums(learner.device), Sums(learner.device)
    norms, rate = [], 0.0
    for index, chosen in enumerate(steps):
        for part in micro_batches(batch.take(chosen), job, n_ranks)[rank]:
            loss = micro_batch_loss(learner.engine, reference, job, part, [sums, first] if index == 0 else [sums])
            learner.engine.backward(loss * n_ranks)  # DeepSpeed divides by the number of processes
        if index == 0 and job.gate is not None:
            others = np.setdiff1d(np.concatenate(steps), chosen)
            _compare(learner.engine, job, batch.take(others), first)
            refuse_beyond(job.gate, agreement(first.over_all_ranks()))
        rate = lr_at(learner.n_steps + 1, job.optimizer.lr, job.schedule)
        norms.append(learner.step(rate))
        progress(index + 1, len(steps))
    duration_s = time.perf_counter() - started
    return _measurements(job, sums.over_all_ranks(), first.over_all_ranks(), norms, rate, duration_s)


@dataclass(frozen=True)
class Part:
    """What one process computes at once."""

    sequences: Sequences
    weights_N: np.ndarray
    """Share of each sampled token in the step's loss; all 0 where the process has no work left."""


def micro_batches(sequences: Sequences, job: Job, n_ranks: int) -> list[list[Part]]:
    """The sequences of one optimizer step, cut for every process; their weights know nothing of the cut."""
    weights_T = np.zeros(len(sequences.ids_T))
    weights_T[sequences.sampled_T] = aggregation.token_weights(
        job.loss.aggregation,
        sequences.per_sampled(sequences.trajectories_S),
        sequences.per_sampled(sequences.groups_S),
        job.loss.constant,
    )
    starts_S = np.cumsum(sequences.lengths_S) - sequences.lengths_S

    def part_of(chosen: np.ndarray) -> Part:
        if len(chosen) == 0:  # all processes must take part in every exchange
            return Part(plain_sequences([[0, 0]], [1]), np.zeros(1))
        part = sequences.take(chosen)
        return Part(part, weights_T[ranges(starts_S[chosen], part.lengths_S)][part.sampled_T])

    by_rank = pack(sequences.lengths_S, job.max_tokens_per_micro_batch, n_ranks)
    return [[part_of(chosen) for chosen in batches] for batches in by_rank]


def micro_batch_loss(model: Any, reference: Any, job: Job, part: Part, sums: "list[Sums]") -> torch.Tensor:
    """The weighted sum of the losses of one micro-batch, with gradient; its numbers are added to ``sums``."""
    device = sums[0].device
    row = row_of(part.sequences, device)
    logits = sampled_logits(model, row)
    logprobs_N = logprobs_of(logits, row)
    sampled_T = part.sequences.sampled_T
    weights_N = torch.from_numpy(part.weights_N.astype(np.float32)).to(device)
    advantages_N = torch.from_numpy(part.sequences.advantages_T[sampled_T]).to(device)
    old_N = torch.from_numpy(part.sequences.logprobs_T[sampled_T]).to(device)
    if job.objective == "policy_gradient":
        token = losses.clipped_policy_gradient(
            logprobs_N,
            old_N if part.weights_N.any() else logprobs_N.detach(),
            advantages_N,
            eps_low=job.loss.eps_low,
            eps_high=job.loss.eps_high,
            ratio_floor=job.loss.ratio_floor,
            ratio_ceiling=job.loss.ratio_ceiling,
        )
    else:
        token = losses.cross_entropy(logprobs_N, advantages_N)
    loss = (weights_N * token.loss_T).sum()
    if job.kl is not None and part.weights_N.any():
        other_N = old_N if job.kl.against == "sampling" else _logprobs_under(reference, row)
        loss = loss + job.kl.coefficient * (weights_N * ESTIMATORS[job.kl.estimator](logprobs_N - other_N)).sum()
    if job.loss.entropy_coefficient:
        loss = loss - job.loss.entropy_coefficient * (weights_N * entropies_of(logits)).sum()
    if part.weights_N.any():
        with torch.no_grad():
            entropies_N = torch.cat([entropies_of(some) for some in logits.split(512)])  # bounds the memory
            for each in sums:
                each.add(loss, token, logprobs_N - old_N, entropies_N, job.logprob_tolerance)
    return loss


def _compare(model: Any, job: Job, sequences: Sequences, sums: "Sums") -> None:
    """Adds what the first step has not compared: the sequences of the later ones, under the same weights."""
    if not len(sequences.lengths_S):
        return
    for part in micro_batches(sequences, job, dist.get_world_size())[dist.get_rank()]:
        row = row_of(part.sequences, sums.device)
        logprobs_N = _logprobs_under(model, row)
        if part.weights_N.any():
            old_N = torch.from_numpy(part.sequences.logprobs_T[part.sequences.sampled_T]).to(sums.device)
            sums.compare(logprobs_N - old_N, job.logprob_tolerance)


def _logprobs_under(reference: Any, row: Row) -> torch.Tensor:
    with torch.no_grad():
        return logprobs_of(sampled_logits(reference, row), row)


@dataclass
class Sums:
    """Sums over tokens, added up over micro-batches and processes; never means of means."""

    device: torch.device
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    largest: torch.Tensor | None = None
    """Largest difference between the sampler's and the trainer's logprob; None: none is known."""

    def add(
        self,
        loss: torch.Tensor,
        token: losses.TokenLoss,
        log_ratio_N: torch.Tensor,
        entropies_N: torch.Tensor,
        tolerance: float,
    ) -> None:
        """One micro-batch; ``log_ratio_N`` as in ``compare``."""
        self._sum("loss", loss)
        self._sum("tokens", torch.tensor(len(log_ratio_N)))
        self._sum("clipped", token.clipped_T.sum())
        self._sum("counted", token.counted_T.sum())
        self._sum("entropy", entropies_N.double().sum())
        self.compare(log_ratio_N, tolerance)

    def compare(self, log_ratio_N: torch.Tensor, tolerance: float) -> None:
        """How far the tokens' logprobs are apart; ``log_ratio_N`` is NaN where the sampling policy's is not known."""
        known_N = ~log_ratio_N.isnan()
        ratio_N = log_ratio_N[known_N].double()
        self._sum("known", known_N.sum())
        self._sum("k1", k1(-ratio_N).sum())
        self._sum("k3", k3(-ratio_N).sum())
        self._sum("off", (ratio_N.abs() > tolerance).sum())
        if len(ratio_N):
            top = ratio_N.abs().max()
            self.largest = top if self.largest is None else torch.maximum(self.largest, top)

    def over_all_ranks(self) -> dict[str, float]:
        """Every sum over all processes, and ``largest``."""
        names = ["loss", "tokens", "clipped", "counted", "entropy", "known", "k1", "k3", "off"]
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.stack([self.values.get(name, zero) for name in names])
        largest = zero.clone() if self.largest is None else self.largest
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(names, total.tolist(), strict=True)) | {"largest": largest.item()}

    def _sum(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().double().to(self.device)
        self.values[name] = self.values[name] + value if name in self.values else value


def _measurements(
    job: Job, every: dict[str, float], first: dict[str, float], norms: list[float], rate: float, duration_s: float
) -> dict[str, float]:
    """The metrics by name.

    ``tokens`` are sampled ones, counted once an epoch; ``loss`` and ``grad_norm`` (before clipping) are means over
    optimizer steps; ``kl`` (k3) and ``kl_k1`` estimate KL(sampling || trained) over all steps; ``sampler_trainer_…``
    (see ``agreement.py``) are of the tokens of the first step, and with a gate of all, before anything is learnt.
    """
    tokens = every["tokens"]
    measured = {
        "loss": every["loss"] / len(norms),
        "entropy": every["entropy"] / tokens,
        "grad_norm": sum(norms) / len(norms),
        "grad_norm_max": max(norms),
        "lr": rate,
        "optimizer_steps": len(norms),
        "tokens": tokens,
        "tokens_per_s": tokens / duration_s,
        "train_s": duration_s,
    }
    if not np.isfinite(measured["loss"]):
        raise StageFailed(f"the loss is {measured['loss']}: the update was given up, nothing was stored")
    if job.objective == "policy_gradient":
        measured["clip_fraction"] = every["clipped"] / tokens
        measured["ratio_kept_fraction"] = every["counted"] / tokens
    if every["known"]:
        measured |= {"kl": every["k3"] / every["known"], "kl_k1": every["k1"] / every["known"]}
    return measured | agreement(first)
