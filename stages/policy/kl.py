"""Estimators of the divergence from another policy, on the tokens that were sampled.

``log_ratio = logprob - reference logprob``. On samples of the policy itself all three estimate
KL(policy || reference); they differ in bias and variance, and in what their gradient pulls at.
"""

import torch


def k1(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """``log_ratio``: unbiased, and may be negative. As a loss its expected gradient on fresh samples is zero.

    Args:
        log_ratio_T: shape ``(T,)``.
    Source: http://joschu.net/blog/kl-approx.html
    """
    return log_ratio_T


def k2(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """``log_ratio² / 2``: biased, low variance; its gradient on fresh samples is that of the divergence.

    Args:
        log_ratio_T: shape ``(T,)``.
    Source: http://joschu.net/blog/kl-approx.html; the gradient: arXiv:2510.01555.
    """
    return log_ratio_T.square() / 2


def k3(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """``exp(-log_ratio) - 1 + log_ratio``: unbiased and never negative.

    Args:
        log_ratio_T: shape ``(T,)``.
    Source: http://joschu.net/blog/kl-approx.html; as a loss: GRPO, arXiv:2402.03300, eq. 4.
    """
    return torch.exp(-log_ratio_T) - 1 + log_ratio_T


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
