import math

import pytest
import torch

from stages.policy.kl import k1, k2, k3
from stages.policy.losses import clipped_policy_gradient, cross_entropy


def clipped(
    ratios: list[float], advantages: list[float], **limits: float
) -> tuple[list[float], list[float], list[bool]]:
    """Losses, their gradients and what was clipped, for these ratios to an old logprob of -1."""
    logprobs = (torch.tensor(ratios, dtype=torch.float64).log() - 1).requires_grad_()
    token = clipped_policy_gradient(
        logprobs,
        torch.full((len(ratios),), -1.0, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        **{"eps_low": 0.2, "eps_high": 0.3, **limits},
    )
    token.loss_T.sum().backward()
    assert logprobs.grad is not None
    return token.loss_T.tolist(), logprobs.grad.tolist(), token.clipped_T.tolist()


def test_inside_the_bounds_the_loss_is_the_ratio_times_the_advantage() -> None:
    loss, gradient, was_clipped = clipped([1.0, 1.1, 0.9], [2.0, -1.0, 0.5])
    assert loss == pytest.approx([-2.0, 1.1, -0.45])
    assert gradient == pytest.approx([-2.0, 1.1, -0.45])
    assert was_clipped == [False, False, False]


def test_a_good_token_is_not_pushed_above_the_upper_bound() -> None:
    loss, gradient, was_clipped = clipped([1.5, 0.5], [2.0, 2.0])
    assert loss == pytest.approx([-2.6, -1.0])
    assert gradient == pytest.approx([0.0, -1.0])
    assert was_clipped == [True, False]


def test_a_bad_token_is_not_pushed_below_the_lower_bound() -> None:
    loss, gradient, was_clipped = clipped([0.5, 1.5], [-2.0, -2.0])
    assert loss == pytest.approx([1.6, 3.0])
    assert gradient == pytest.approx([0.0, 3.0])
    assert was_clipped == [True, False]


def test_a_token_beyond_the_ratio_limits_has_neither_loss_nor_gradient() -> None:
    loss, gradient, was_clipped = clipped([0.4, 1.0, 3.0], [1.0, 1.0, -1.0], ratio_floor=0.5, ratio_ceiling=2.0)
    assert loss == pytest.approx([0.0, -1.0, 0.0])
    assert gradient == pytest.approx([0.0, -1.0, 0.0])
    assert was_clipped == [False, False, False]


def test_cross_entropy_weighs_each_token_with_its_trajectory() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    token = cross_entropy(logprobs, torch.tensor([1.0, 0.25]))
    token.loss_T.sum().backward()
    assert token.loss_T.tolist() == [0.5, 0.5]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -0.25]


def test_the_estimators_have_their_formulas() -> None:
    log_ratio = torch.tensor([0.5, -1.0])
    assert k1(log_ratio).tolist() == [0.5, -1.0]
    assert k2(log_ratio).tolist() == [0.125, 0.5]
    assert k3(log_ratio).tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2], rel=1e-6)


def test_k1_and_k3_have_the_divergence_as_their_mean() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    log_ratio = policy.log() - reference.log()
    divergence = (policy * log_ratio).sum().item()
    assert (policy * k1(log_ratio)).sum().item() == pytest.approx(divergence)
    assert (policy * k3(log_ratio)).sum().item() == pytest.approx(divergence)
    assert (k3(log_ratio) >= 0).all()


def test_on_fresh_samples_k2_pulls_as_the_divergence_does_and_k1_not_at_all() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), -1)

    def gradient(of: object) -> list[float]:
        logs = torch.log_softmax(logits, -1)
        samples = logs.exp().detach()  # how often each token is drawn
        loss = (logs.exp() * (logs - reference)).sum() if of is None else (samples * of(logs - reference)).sum()  # type: ignore[operator]
        (found,) = torch.autograd.grad(loss, logits)
        return found.tolist()

    assert gradient(k2) == pytest.approx(gradient(None))
    assert gradient(k1) == pytest.approx([0, 0, 0], abs=1e-12)
