"""Tokens that are looked at while more come."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stages.rollouts.engines.progress import Pieces


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=200), max_size=20))
def test_pieces_are_told_whole_and_what_was_seen_before_never_changes(parts: list[list[int]]) -> None:
    pieces, seen = Pieces(), []
    for part in parts:
        ids = np.array(part, dtype=np.int32)
        pieces.add((ids, -ids.astype(np.float32)))
        seen.append(pieces.so_far())
    for n, (told_ids, told_logprobs) in enumerate(seen, start=1):
        expected = np.array([token for part in parts[:n] for token in part], dtype=np.int32)
        np.testing.assert_array_equal(told_ids, expected)
        np.testing.assert_array_equal(told_logprobs, -expected.astype(np.float32))
