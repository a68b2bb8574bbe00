import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.policy.aggregation import Aggregation, token_weights

# three trajectories of 1, 3 and 2 tokens; the first two are of one group
TRAJECTORIES = np.array([0, 1, 1, 1, 2, 2])
GROUPS = np.array([0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("aggregation", "constant", "weights"),
    [
        ("token-mean", None, [1 / 6] * 6),
        ("seq-mean-token-mean", None, [1 / 3, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6]),
        ("seq-mean-token-sum", None, [1 / 3] * 6),
        ("constant", 10, [1 / 30] * 6),
        ("prompt-mean", None, [1 / 8] * 4 + [1 / 4] * 2),
    ],
)
def test_each_aggregation_counts_what_it_says(
    aggregation: Aggregation, constant: int | None, weights: list[float]
) -> None:
    assert token_weights(aggregation, TRAJECTORIES, GROUPS, constant) == pytest.approx(np.array(weights))


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.sampled_from(["token-mean", "seq-mean-token-mean", "prompt-mean"]),
)
def test_means_add_up_to_one_in_any_order_of_tokens(trajectories: list[int], aggregation: Aggregation) -> None:
    owners = np.array(trajectories)
    weights = token_weights(aggregation, owners, owners // 2)
    assert weights.sum() == pytest.approx(1)
    order = np.random.default_rng(0).permutation(len(owners))
    assert token_weights(aggregation, owners[order], owners[order] // 2) == pytest.approx(weights[order])


def test_no_tokens_have_no_weights() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert len(token_weights("token-mean", nothing, nothing)) == 0


def test_a_constant_is_never_guessed() -> None:
    with pytest.raises(ValueError, match="needs the number"):
        token_weights("constant", TRAJECTORIES, GROUPS)
