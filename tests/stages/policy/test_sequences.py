from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.tables import FLOATS, STEPS
from stages.policy.sequences import Sequences, plain_sequences, sequences_from_steps

SCHEMA = pa.schema(
    [STEPS.schema.field(name) for name in ("episode_id", "trajectory", "step_index", "prefix_length")]
    + [STEPS.schema.field(name) for name in ("prompt_ids", "response_ids", "logprobs")]
    + [pa.field("temperature", pa.float64()), pa.field("trajectory_number", pa.int64())]
    + [pa.field("group_number", pa.int64()), pa.field("advantage", pa.float64()), pa.field("token_advantages", FLOATS)]
)


def step(
    number: int, index: int, prefix: int, prompt: list[int], response: list[int], **columns: Any
) -> dict[str, Any]:
    """A model call of the trajectory with this number, whose advantage is its number plus a half."""
    return {
        "episode_id": f"e{number}",
        "trajectory": "default",
        "step_index": index,
        "prefix_length": prefix,
        "prompt_ids": prompt,
        "response_ids": response,
        "logprobs": [-0.1 * (place + 1) for place in range(len(response))],
        "temperature": 1.0,
        "trajectory_number": number,
        "group_number": number // 2,
        "advantage": number + 0.5,
        "token_advantages": None,
    } | columns


def sequences(*steps: dict[str, Any]) -> Sequences:
    return sequences_from_steps(pa.Table.from_pylist(list(steps), schema=SCHEMA))


def test_a_trajectory_is_the_concatenation_of_its_steps() -> None:
    made = sequences(step(0, 0, 0, [1, 2], [3, 4]), step(0, 1, 4, [5], [6]))
    assert made.ids_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert made.sampled_T.tolist() == [False, False, True, True, False, True]
    assert made.lengths_S.tolist() == [6]
    np.testing.assert_allclose(made.logprobs_T, [np.nan, np.nan, -0.1, -0.2, np.nan, -0.1], rtol=1e-6)
    np.testing.assert_array_equal(made.advantages_T, [np.nan, np.nan, 0.5, 0.5, np.nan, 0.5])


def test_a_shorter_prefix_starts_a_sequence_whose_beginning_is_not_trained_on_again() -> None:
    made = sequences(
        step(0, 0, 0, [1, 2], [3, 4]), step(0, 1, 3, [7], [8, 9]), step(0, 2, 6, [10], [11]), step(1, 0, 0, [1], [2])
    )
    assert made.lengths_S.tolist() == [4, 8, 2]
    assert made.ids_T.tolist() == [1, 2, 3, 4, 1, 2, 3, 7, 8, 9, 10, 11, 1, 2]
    assert made.sampled_T.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1]
    assert made.trajectories_S.tolist() == [0, 0, 1]


def test_a_prefix_may_be_cut_twice() -> None:
    made = sequences(step(0, 0, 0, [1, 2], [3, 4]), step(0, 1, 3, [5], [6]), step(0, 2, 2, [7], [8]))
    assert np.split(made.ids_T, [4, 9])[2].tolist() == [1, 2, 7, 8]


@given(st.data())
def test_any_conversation_comes_out_as_a_plain_loop_builds_it(data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 99), max_size=4)
    rows, expected = [], []
    for number in range(data.draw(st.integers(1, 4))):
        full: list[int] = []
        mask: list[int] = []
        for index in range(data.draw(st.integers(1, 5))):
            prefix = 0 if index == 0 else data.draw(st.sampled_from([len(full), data.draw(st.integers(0, len(full)))]))
            prompt, response = data.draw(ids) or [1], data.draw(ids)
            if prefix < len(full):
                expected.append((full, mask))
                full, mask = full[:prefix], [0] * prefix
            full, mask = full + prompt + response, mask + [0] * len(prompt) + [1] * len(response)
            rows.append(step(number, index, prefix, prompt, response))
        expected.append((full, mask))
    made = sequences(*rows)
    cuts = np.cumsum(made.lengths_S)[:-1]
    assert [part.tolist() for part in np.split(made.ids_T, cuts)] == [full for full, _ in expected]
    assert [part.astype(int).tolist() for part in np.split(made.sampled_T, cuts)] == [mask for _, mask in expected]


def test_token_advantages_run_over_the_steps_of_a_trajectory() -> None:
    made = sequences(
        step(0, 0, 0, [1], [2, 3], token_advantages=[0.1, 0.2, 0.3]),
        step(0, 1, 3, [4, 5], [6], token_advantages=[0.1, 0.2, 0.3]),
        step(1, 0, 0, [1], [2]),
    )
    np.testing.assert_allclose(made.advantages_T[made.sampled_T], [0.1, 0.2, 0.3, 1.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt_ids": None}, "episode e1, trajectory default have no prompt_ids"),
        ({"response_ids": None}, "episode e1, trajectory default have no response_ids"),
        ({"logprobs": [-0.1]}, "e1.* another number of logprobs"),
        ({"prefix_length": 1}, "e1.* keeps more ids than there were"),
        ({"prompt_ids": []}, "e1.* no prompt"),
        ({"token_advantages": [1.0]}, "e1.* another number of token_advantages"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sequences(step(0, 0, 0, [1], [2]), step(1, 0, 0, [1], [2, 3], **columns))


def test_a_missing_logprob_stays_missing() -> None:
    made = sequences(step(0, 0, 0, [1], [2], logprobs=None), step(1, 0, 0, [1], [2]))
    assert np.isnan(made.logprobs_T[made.sampled_T]).tolist() == [True, False]


def test_saved_sequences_are_read_back(tmp_path: Any) -> None:
    made = sequences(step(0, 0, 0, [1, 2], [3]))
    made.save(tmp_path / "s")
    again = Sequences.load(tmp_path / "s")
    for name, array in vars(made).items():
        np.testing.assert_array_equal(array, getattr(again, name))
        assert array.dtype == getattr(again, name).dtype


def test_sequences_without_sampled_tokens_can_be_left_out() -> None:
    made = sequences(step(0, 0, 0, [1], []), step(1, 0, 0, [4], [5])).with_sampled_tokens()
    assert made.ids_T.tolist() == [4, 5]
    assert made.trajectories_S.tolist() == [1]


def test_plain_sequences_learn_what_follows_the_context() -> None:
    made = plain_sequences([[1, 2, 3], [4, 5]], [2, 1])
    assert made.sampled_T.astype(int).tolist() == [0, 0, 1, 0, 1]
    assert made.take(np.array([1])).ids_T.tolist() == [4, 5]
