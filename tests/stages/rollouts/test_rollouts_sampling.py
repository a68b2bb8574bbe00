"""Tokens are drawn from the distribution that temperature, top-k and top-p define, and each row by itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollouts.engines.sampling import RowParams, sample, uniforms


def params(n, temperature=1.0, top_p=1.0, top_k=0):
    return RowParams(np.full(n, float(temperature)), np.full(n, float(top_p)), np.full(n, top_k, dtype=np.int64))


def expected(logits, temperature, top_p, top_k):
    """The distribution that is sampled from, by the definition, one row in plain numpy."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    keep = order[:top_k] if top_k else order
    mass = np.exp(scaled - scaled.max())
    share = np.cumsum(mass[keep]) / mass[keep].sum()
    keep = keep[: np.searchsorted(share, top_p) + 1] if top_p < 1 else keep
    found = np.zeros(len(logits))
    found[keep] = mass[keep] / mass[keep].sum()
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 40),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
)
def test_the_inverse_of_the_distribution_is_exact(seed, size, temperature, top_p, top_k):
    """Sampling at the middle of each token's interval of the cumulative distribution gives that token."""
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3
    wanted = expected(logits, temperature, top_p, min(top_k, size))
    middles = np.cumsum(wanted) - wanted / 2
    tokens = np.flatnonzero(wanted > 1e-9)
    batch = torch.from_numpy(np.tile(logits, (len(tokens), 1)))
    ids, logprobs = sample(batch, middles[tokens], params(len(tokens), temperature, top_p, top_k))
    assert ids.tolist() == tokens.tolist()
    raw = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    np.testing.assert_allclose(logprobs, raw[tokens], atol=1e-6)


def test_the_edges_of_the_unit_interval_give_tokens_that_can_occur():
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]])
    low, _ = sample(logits, np.array([0.0]), params(1))
    high, _ = sample(logits, np.array([np.nextafter(1.0, 0.0)]), params(1))
    assert (low[0], high[0]) == (1, 2)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 6))
def test_rows_of_one_batch_do_not_touch_each_other(seed, n):
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(n, 30)).astype(np.float32))
    mixed = RowParams(random.choice([0.0, 0.5, 1.0], n), random.choice([0.5, 0.9, 1.0], n), random.choice([0, 1, 5], n))
    shares = random.random(n)
    ids, logprobs = sample(logits, shares, mixed)
    for row in range(n):
        one = RowParams(mixed.temperature[[row]], mixed.top_p[[row]], mixed.top_k[[row]])
        alone = sample(logits[[row]], shares[[row]], one)
        assert alone[0][0] == ids[row]
        assert alone[1][0] == logprobs[row]


def test_a_nucleus_wider_than_the_leading_candidates_is_found():
    logits = torch.zeros(2, 6000)
    logits[1, :10] = 20.0
    ids, _ = sample(logits, np.array([0.7, 0.5]), params(2, top_p=0.9))
    assert ids[0] == pytest.approx(0.7 * 6000, abs=1)  # ties at the edge are kept, so all 6000 stay
    assert ids[1] == 5


def test_a_row_that_is_no_distribution_is_a_fault():
    with pytest.raises(FloatingPointError):
        sample(torch.tensor([[0.0, float("nan")]]), np.array([0.5]), params(1))


def test_a_stream_belongs_to_its_seed_and_begins_alike_for_every_length():
    assert uniforms(5, 100)[:10].tolist() == uniforms(5, 10).tolist()
    assert uniforms(5, 10).tolist() != uniforms(6, 10).tolist()
    assert abs(uniforms(2**63 - 1, 10_000).mean() - 0.5) < 0.02
