import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.policy.packing import pack, padded_layout

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 120), st.integers(1, 4))
def test_every_sequence_is_in_one_micro_batch_and_all_ranks_have_as_many(
    lengths: list[int], max_tokens: int, n_ranks: int
) -> None:
    by_rank = pack(np.array(lengths), max_tokens, n_ranks)
    assert len({len(batches) for batches in by_rank}) == 1
    chosen = np.concatenate([batch for batches in by_rank for batch in batches])
    assert sorted(chosen.tolist()) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 120), st.integers(1, 4))
def test_a_micro_batch_is_within_the_budget_or_one_sequence(lengths: list[int], max_tokens: int, n_ranks: int) -> None:
    for batches in pack(np.array(lengths), max_tokens, n_ranks):
        for batch in batches:
            assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= max_tokens


def test_work_that_fits_one_micro_batch_is_shared_among_the_ranks() -> None:
    by_rank = pack(np.array([10, 10, 10, 10]), 1000, 2)
    assert [sum(len(batch) for batch in batches) for batches in by_rank] == [2, 2]


@given(LENGTHS)
def test_the_padded_layout_leads_to_every_token_and_back(lengths: list[int]) -> None:
    rows, flat = padded_layout(np.array(lengths))
    tokens = np.arange(sum(lengths))
    assert (rows.ravel()[flat] == tokens).all()
    split = np.split(tokens, np.cumsum(lengths)[:-1])
    assert all((row[: len(own)] == own).all() for row, own in zip(rows, split, strict=True))
