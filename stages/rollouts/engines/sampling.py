"""Chooses the next token of every row at once, by the inverse of the cumulative distribution.

Each row brings its own uniform number, so what is sampled for it does not depend on the other rows.
"""

from dataclasses import dataclass

import numpy as np
import torch

_LEADING = (128, 4096)
"""Candidates that are sorted at first when a nucleus is sought; most nuclei are smaller."""


@dataclass
class RowParams:
    """Sampling parameters by row, shape ``(B,)`` each."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    """0: no limit."""


def uniforms(seed: int, count: int) -> np.ndarray:
    """The first ``count`` numbers in [0, 1) of the stream that belongs to ``seed`` (Philox, counter-based)."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def sample(logits_BV: torch.Tensor, uniforms_B: np.ndarray, params: RowParams) -> tuple[np.ndarray, np.ndarray]:
    """One token a row, and the natural-log probability that the raw distribution gives it.

    Args:
        logits_BV: of any float type.
        uniforms_B: float64 in [0, 1).
    Returns:
        ids (int64) and logprobs (float32), shape ``(B,)``.
    Raises:
        FloatingPointError: a row is not a distribution.
    """
    logits = logits_BV.double()
    normaliser = logits.logsumexp(-1)
    if not normaliser.isfinite().all():
        raise FloatingPointError("logits are not numbers")
    greedy = params.temperature == 0
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy)).to(logits.device)
        ids[rows] = logits[rows].argmax(-1)
    if not greedy.all():
        chosen = np.flatnonzero(~greedy)
        rows = torch.from_numpy(chosen).to(logits.device)
        mine = RowParams(params.temperature[chosen], params.top_p[chosen], params.top_k[chosen])
        ids[rows] = _inverse(_weights(logits if len(chosen) == len(logits) else logits[rows], mine), uniforms_B[chosen])
    logprobs = logits.gather(1, ids[:, None])[:, 0] - normaliser
    return ids.cpu().numpy(), logprobs.float().cpu().numpy()


def _weights(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Unnormalised probabilities after temperature, top-k and top-p, in that order; ties at an edge are kept."""
    if (params.temperature != 1).any():
        logits = logits / torch.from_numpy(params.temperature).to(logits.device)[:, None]
    weights = (logits - logits.amax(-1, keepdim=True)).exp_()
    limited = np.flatnonzero((params.top_k > 0) & (params.top_k < logits.shape[1]))
    if len(limited):
        rows = torch.from_numpy(limited).to(logits.device)
        top_k = torch.from_numpy(params.top_k[limited]).to(logits.device)
        largest = weights[rows].topk(int(top_k.max()), -1).values
        edge = largest.gather(1, top_k[:, None] - 1)
        weights[rows] = weights[rows] * (weights[rows] >= edge)
    nucleus = np.flatnonzero(params.top_p < 1)
    if len(nucleus):
        rows = torch.from_numpy(nucleus).to(logits.device)
        edge = _nucleus_edge(weights[rows], torch.from_numpy(params.top_p[nucleus]).to(logits.device)[:, None])
        weights[rows] = weights[rows] * (weights[rows] >= edge)
    return weights


def _nucleus_edge(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest weight in the smallest set of largest weights that holds ``top_p`` of the mass, shape ``(B, 1)``."""
    goal = weights.sum(-1, keepdim=True) * top_p
    edge = torch.empty_like(goal)
    left = torch.arange(len(weights), device=weights.device)
    for size in (*_LEADING, weights.shape[1]):
        largest = weights[left].topk(min(size, weights.shape[1]), -1).values
        mass = largest.cumsum(-1)
        last = (mass < goal[left]).sum(-1, keepdim=True)
        edge[left] = largest.gather(1, last.clamp(max=largest.shape[1] - 1))
        left = left[last[:, 0] == largest.shape[1]]
        if not len(left):
            break
    return edge


def _inverse(weights: torch.Tensor, uniforms_B: np.ndarray) -> torch.Tensor:
    """The first token whose cumulative weight exceeds the row's uniform share of the whole."""
    mass = weights.cumsum_(-1)
    goal = torch.from_numpy(uniforms_B).to(mass.device)[:, None] * mass[:, -1:]
    # u < 1, but its product with the whole may round up to the whole: then the last token with a weight is meant.
    last = torch.searchsorted(mass, mass[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(mass, goal, right=True), last)[:, 0]
