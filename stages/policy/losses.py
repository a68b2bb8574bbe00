"""Losses on single tokens: pure functions over tensors, one value a token, nothing summed.

How tokens become one number is ``aggregation``'s business; how the logprobs came about is the trainer's.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token, and what was limited on the way."""

    loss_T: torch.Tensor
    """shape ``(T,)``, float32, with gradient."""
    clipped_T: torch.Tensor
    """shape ``(T,)``, bool: the clip holds this token's gradient at zero."""
    counted_T: torch.Tensor
    """shape ``(T,)``, bool: false where the ratio's limits took the token out (its loss is 0)."""


def clipped_policy_gradient(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    ratio_floor: float | None = None,
    ratio_ceiling: float | None = None,
) -> TokenLoss:
    """``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)`` with ``r = exp(logprob - old)``.

    Args:
        logprobs_T: of the policy that is trained, shape ``(T,)``, with gradient.
        old_logprobs_T: of the policy that sampled, shape ``(T,)``.
        advantages_T: shape ``(T,)``.
        ratio_floor: tokens with a smaller ratio are taken out; None: none are.
        ratio_ceiling: tokens with a larger ratio are taken out; None: none are.
    Source: PPO, arXiv:1707.06347, eq. 7; two bounds: DAPO, arXiv:2503.14476, eq. 10.
    """
    ratios_T = torch.exp(logprobs_T - old_logprobs_T)
    free_T = ratios_T * advantages_T
    bounded_T = ratios_T.clamp(1 - eps_low, 1 + eps_high) * advantages_T
    counted_T = torch.ones_like(ratios_T, dtype=torch.bool)
    if ratio_floor is not None:
        counted_T &= ratios_T.detach() >= ratio_floor
    if ratio_ceiling is not None:
        counted_T &= ratios_T.detach() <= ratio_ceiling
    loss_T = torch.where(counted_T, -torch.minimum(free_T, bounded_T), torch.zeros_like(free_T))
    return TokenLoss(loss_T, (bounded_T < free_T).detach() & counted_T, counted_T)


def cross_entropy(logprobs_T: torch.Tensor, weights_T: torch.Tensor) -> TokenLoss:
    """``-w logprob``: imitation of the tokens, each with the weight of its trajectory.

    Args:
        logprobs_T: shape ``(T,)``, with gradient.
        weights_T: shape ``(T,)``; 1 everywhere is plain supervised training.
    """
    nothing_T = torch.zeros_like(logprobs_T, dtype=torch.bool)
    return TokenLoss(-weights_T * logprobs_T, nothing_T, ~nothing_T)
