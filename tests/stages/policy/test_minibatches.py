import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.policy.minibatches import by_group, by_tokens


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 3))
def test_each_epoch_uses_every_sequence_once_and_divides_no_group(groups: list[int], n: int, epochs: int) -> None:
    names = [f"g{number}" for number in range(7)]
    groups_S = np.array(groups)
    steps = by_group(names, groups_S, n, epochs)
    assert sorted(np.concatenate(steps).tolist()) == sorted(list(range(len(groups))) * epochs)
    per_epoch = len(steps) // epochs
    assert per_epoch == min(n, len(set(groups)))
    for epoch in range(epochs):
        seen = [set(groups_S[step]) for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert sum(len(some) for some in seen) == len(set(groups))


def test_the_division_depends_on_ids_and_not_on_their_order() -> None:
    names = [f"g{number}" for number in range(8)]
    steps = by_group(names, np.arange(8), 4, 1)
    turned = by_group(names[::-1], np.arange(8), 4, 1)
    assert [{names[s] for s in step} for step in steps] == [{names[::-1][s] for s in step} for step in turned]


def test_every_epoch_mixes_anew() -> None:
    names = [f"g{number}" for number in range(16)]
    steps = by_group(names, np.arange(16), 4, 2)
    assert [set(step) for step in steps[:4]] != [set(step) for step in steps[4:]]


def test_fewer_groups_than_steps_make_fewer_steps() -> None:
    assert len(by_group(["a", "b"], np.array([0, 0, 1]), 5, 1)) == 2


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 10), st.integers(1, 60))
def test_a_sequence_is_not_repeated_before_all_were_used(lengths: list[int], n_steps: int, tokens: int) -> None:
    steps = by_tokens(np.array(lengths), n_steps, tokens, seed=3)
    stream = np.concatenate(steps)
    assert len(steps) == n_steps
    assert all(sum(lengths[s] for s in step) >= tokens for step in steps)
    whole = len(stream) // len(lengths) * len(lengths)
    for start in range(0, whole, len(lengths)):
        assert len(set(stream[start : start + len(lengths)])) == len(lengths)
