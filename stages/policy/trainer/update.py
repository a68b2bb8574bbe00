"""One training: optimizer steps over packed sequences, with sums over all processes behind every number."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from schemas.errors import StageFailed
from stages.policy import aggregation, losses
from stages.policy.kl import ESTIMATORS, k1, k3
from stages.policy.packing import pack
from stages.policy.schedule import lr_at
from stages.policy.sequences import Sequences, plain_sequences
from stages.policy.trainer.forward import Row, entropies_of, logprobs_of, row_of, sampled_logits
from stages.policy.trainer.job import Job
from stages.policy.trainer.learner import Learner

Progress = Callable[[int, int], None]


def train(
    learner: Learner,
    reference: torch.nn.Module | None,
    job: Job,
    batch: Sequences,
    steps: list[np.ndarray],
    progress: Progress,
) -> dict[str, float]:
    """Takes every step; returns the measurements.

    Args:
        reference: the model that the penalty measures against; None: none is needed.
        steps: numbers of the sequences of each optimizer step.
    """
    started = time.perf_counter()
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    sums, first = _Sums(learner.device), _Sums(learner.device)
    norms, rate = [], 0.0
    for index, chosen in enumerate(steps):
        sequences = batch.take(chosen)
        for part, weights in _micro_batches(sequences, job, rank, n_ranks):
            loss = _loss(learner, reference, job, part, weights, [sums, first] if index == 0 else [sums])
            learner.engine.backward(loss * n_ranks)  # DeepSpeed divides by the number of processes
        rate = lr_at(learner.n_steps + 1, job.optimizer.lr, job.schedule)
        norms.append(learner.step(rate))
        progress(index + 1, len(steps))
    duration_s = time.perf_counter() - started
    return _measurements(job, sums.over_all_ranks(), first.over_all_ranks(), norms, rate, duration_s)


def _micro_batches(sequences: Sequences, job: Job, rank: int, n_ranks: int) -> list[tuple[Sequences, np.ndarray]]:
    """This process's share of a step: sequences, and the weights of their sampled tokens."""
    trajectories_T = sequences.per_sampled(sequences.trajectories_S)
    groups_T = sequences.per_sampled(sequences.groups_S)
    weights = np.zeros(len(sequences.ids_T))
    weights[sequences.sampled_T] = aggregation.token_weights(
        job.loss.aggregation, trajectories_T, groups_T, job.loss.constant
    )
    starts = np.cumsum(sequences.lengths_S) - sequences.lengths_S
    parts = []
    for chosen in pack(sequences.lengths_S, job.max_tokens_per_micro_batch, n_ranks)[rank]:
        if len(chosen) == 0:
            parts.append((_idle(), np.zeros(1)))
            continue
        part = sequences.take(chosen)
        lengths = sequences.lengths_S[chosen]
        tokens = np.concatenate([np.arange(s, s + n) for s, n in zip(starts[chosen], lengths, strict=True)])
        parts.append((part, weights[tokens][part.sampled_T]))
    return parts


def _idle() -> Sequences:
    """What a process without work computes, so that all take part in every exchange; its weight is 0."""
    return plain_sequences([[0, 0]], [1])


def _loss(
    learner: Learner,
    reference: torch.nn.Module | None,
    job: Job,
    part: Sequences,
    weights: np.ndarray,
    sums: "list[_Sums]",
) -> torch.Tensor:
    """The weighted sum over one micro-batch, with gradient."""
    device = learner.device
    row = row_of(part, device)
    logits = sampled_logits(learner.engine, row)
    logprobs_N = logprobs_of(logits, row)
    weights_N = torch.from_numpy(weights.astype(np.float32)).to(device)
    advantages_N = torch.from_numpy(part.advantages_T[part.sampled_T]).to(device)
    old_N = torch.from_numpy(part.logprobs_T[part.sampled_T]).to(device)
    if job.objective == "policy_gradient":
        token = losses.clipped_policy_gradient(
            logprobs_N,
            old_N,
            advantages_N,
            eps_low=job.loss.eps_low,
            eps_high=job.loss.eps_high,
            ratio_floor=job.loss.ratio_floor,
            ratio_ceiling=job.loss.ratio_ceiling,
        )
    else:
        token = losses.cross_entropy(logprobs_N, advantages_N)
    loss = (weights_N * token.loss_T).sum()
    if job.kl is not None:
        other_N = old_N if job.kl.against == "sampling" else _logprobs_under(reference, row)
        penalty_N = ESTIMATORS[job.kl.estimator](logprobs_N - other_N)
        loss = loss + job.kl.coefficient * (weights_N * penalty_N).sum()
    if job.loss.entropy_coefficient:
        loss = loss - job.loss.entropy_coefficient * (weights_N * entropies_of(logits)).sum()
    if weights.any():
        with torch.no_grad():
            entropies_N = torch.cat([entropies_of(some) for some in logits.detach().split(512)])  # bounds the memory
            for each in sums:
                each.add(loss.detach(), token, logprobs_N.detach() - old_N, entropies_N, job.logprob_tolerance)
    return loss


def _logprobs_under(reference: torch.nn.Module | None, row: Row) -> torch.Tensor:
    assert reference is not None
    with torch.no_grad():
        return logprobs_of(sampled_logits(reference, row), row)


@dataclass
class _Sums:
    """Sums over tokens, added up over micro-batches and processes; never means of means."""

    device: torch.device
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    largest: torch.Tensor | None = None

    def add(
        self,
        loss: torch.Tensor,
        token: losses.TokenLoss,
        log_ratio_N: torch.Tensor,
        entropies_N: torch.Tensor,
        tolerance: float,
    ) -> None:
        """One micro-batch; ``log_ratio_N`` is NaN where the sampling policy's logprob is not known."""
        known_N = ~log_ratio_N.isnan()
        ratio_N = log_ratio_N[known_N].double()
        self._sum("loss", loss)
        self._sum("tokens", torch.tensor(len(log_ratio_N)))
        self._sum("clipped", token.clipped_T.sum())
        self._sum("counted", token.counted_T.sum())
        self._sum("entropy", entropies_N.double().sum())
        self._sum("known", known_N.sum())
        self._sum("k1", -k1(ratio_N).sum())
        self._sum("k3", k3(-ratio_N).sum())
        self._sum("off", (ratio_N.abs() > tolerance).sum())
        top = ratio_N.abs().max() if len(ratio_N) else torch.zeros((), dtype=torch.float64, device=self.device)
        self.largest = top if self.largest is None else torch.maximum(self.largest, top)

    def over_all_ranks(self) -> dict[str, float]:
        names = ["loss", "tokens", "clipped", "counted", "entropy", "known", "k1", "k3", "off"]
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.stack([self.values.get(name, zero) for name in names])
        largest = self.largest if self.largest is not None else zero
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(names, total.tolist(), strict=True)) | {"largest": largest.item()}

    def _sum(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().double().to(self.device)
        self.values[name] = self.values[name] + value if name in self.values else value


def _measurements(
    job: Job, all_steps: dict[str, float], first: dict[str, float], norms: list[float], rate: float, duration_s: float
) -> dict[str, float]:
    tokens = all_steps["tokens"]
    measured = {
        "loss": all_steps["loss"] / len(norms),
        "entropy": all_steps["entropy"] / tokens,
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
        measured |= {
            "clip_fraction": all_steps["clipped"] / tokens,
            "ratio_kept_fraction": all_steps["counted"] / tokens,
        }
    if first["known"]:
        measured |= {
            "kl": all_steps["k3"] / all_steps["known"],
            "kl_k1": all_steps["k1"] / all_steps["known"],
            "sampler_trainer_kl": first["k3"] / first["known"],
            "sampler_trainer_kl_k1": first["k1"] / first["known"],
            "sampler_trainer_logprob_diff_max": first["largest"],
            "sampler_trainer_off_fraction": first["off"] / first["known"],
        }
    return measured
