"""What is believed of a server's answer: only that every id and every logprob is there, and fits."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.rollouts.engines.base import GenerationRequest, SamplingParams
from stages.rollouts.workers.answers import UnusableAnswer, forced_logprob, prompt_logprobs, sampled, sampling_body

PROMPT = np.array([5, 6, 7], dtype=np.int32)
SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(2, 9))
REQUEST = GenerationRequest(PROMPT, SAMPLING, seed=2**63 + 5)
VOCABULARY = 40


def answer(ids=(11, 12, 13, 14), reason="length", **changed):
    ids = list(ids)
    choice = {
        "prompt_token_ids": PROMPT.tolist(),
        "token_ids": ids,
        "finish_reason": reason,
        "logprobs": {
            "token_logprobs": [-0.25 - n for n in range(len(ids))],
            "tokens": [f"token_id:{token}" for token in ids],
        },
    }
    return json.dumps({"choices": [choice | changed]}).encode()


def test_ids_and_logprobs_come_out_as_they_were_sampled():
    found = sampled(answer(), REQUEST, VOCABULARY)
    assert found.response_ids.tolist() == [11, 12, 13, 14]
    assert found.logprobs.tolist() == [-0.25, -1.25, -2.25, -3.25]
    assert (found.response_ids.dtype, found.logprobs.dtype) == (np.int32, np.float32)
    assert found.finish_reason == "length"


@pytest.mark.parametrize("ids", [[2], [11, 9], [11, 12, 13, 2]])
def test_a_sampled_stop_token_is_kept(ids):
    found = sampled(answer(ids, "stop"), REQUEST, VOCABULARY)
    assert found.response_ids.tolist() == ids
    assert found.finish_reason == "stop"


def test_an_answer_that_stops_at_its_last_token_has_stopped_whichever_limit_the_server_names():
    assert sampled(answer([11, 12, 13, 2], "length"), REQUEST, VOCABULARY).finish_reason == "stop"


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([11, 12], "length"),  # shorter than was asked for, and no stop token at the end
        ([11, 12], "stop"),
        ([2, 12, 13, 14], "length"),  # went on after a stop token
        ([2, 2], "stop"),
        ([11, 12, 13, 14], "stop"),
        ([11, 12, 13, 14], "abort"),
        ([11, 12, 13, 14], None),
        ([], "stop"),
        ([11, 12, 13, 14, 15], "length"),
        ([11, 12, 13, 40], "length"),
        ([11, 12, 13, -1], "length"),
        ([11, 12, 13, 14.5], "length"),
        ([11, 12, 13, True], "length"),
    ],
)
def test_an_end_that_does_not_fit_the_ids_is_refused(ids, reason):
    with pytest.raises(UnusableAnswer):
        sampled(answer(ids, reason), REQUEST, VOCABULARY)


@pytest.mark.parametrize(
    "logprobs",
    [
        [-1.0, -1.0, -1.0],
        [-1.0] * 5,
        [-1.0, None, -1.0, -1.0],
        [-1.0, "-1.0", -1.0, -1.0],
        [-1.0, 0.5, -1.0, -1.0],
        [-1.0, float("nan"), -1.0, -1.0],
        [-1.0, float("-inf"), -1.0, -1.0],
        [-1.0, -9999.0, -1.0, -1.0],
        [True] * 4,
        [[-1.0]] * 4,
        [],
        None,
        {},
    ],
)
def test_a_logprob_that_is_missing_or_none_is_never_padded(logprobs):
    given = {"token_logprobs": logprobs, "tokens": [f"token_id:{token}" for token in (11, 12, 13, 14)]}
    with pytest.raises(UnusableAnswer):
        sampled(answer(logprobs=given), REQUEST, VOCABULARY)


@pytest.mark.parametrize(
    "tokens",
    [
        ["token_id:11", "token_id:12", "token_id:13", "token_id:15"],  # the most likely one's, not the sampled one's
        ["token_id:11", "token_id:12", "token_id:13"],
        ["a", "b", "c", "d"],
        [11, 12, 13, 14],
        None,
    ],
)
def test_logprobs_must_say_that_they_belong_to_the_sampled_tokens(tokens):
    given = {"token_logprobs": [-1.0] * 4, "tokens": tokens}
    with pytest.raises(UnusableAnswer):
        sampled(answer(logprobs=given), REQUEST, VOCABULARY)


@pytest.mark.parametrize("prompt", [[1, 5, 6, 7], [5, 6], [], None, [5, 6, 8]])
def test_a_prompt_that_was_read_otherwise_is_refused(prompt):
    with pytest.raises(UnusableAnswer):
        sampled(answer(prompt_token_ids=prompt), REQUEST, VOCABULARY)


_json = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["choices", "token_ids", "logprobs"]), inner),
)


@given(st.binary(max_size=60) | _json.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_unusable_and_nothing_else(body):
    for read in (
        lambda: sampled(body, REQUEST, VOCABULARY),
        lambda: prompt_logprobs(body, PROMPT),
        lambda: forced_logprob(body, 3),
    ):
        with pytest.raises(UnusableAnswer):
            read()


def test_a_request_leaves_nothing_to_a_servers_defaults():
    body = sampling_body(replace(REQUEST, sampling=replace(SAMPLING, top_k=None)))
    assert body["prompt"] == [5, 6, 7]
    assert body["seed"] == 5
    assert body["stop_token_ids"] == [2, 9]
    assert body["ignore_eos"]
    assert (body["top_k"], body["top_p"], body["min_p"], body["repetition_penalty"]) == (-1, 1.0, 0.0, 1.0)
    assert sampling_body(replace(REQUEST, sampling=replace(SAMPLING, top_k=7)))["top_k"] == 7


def test_prompt_logprobs_are_those_of_the_prompts_own_tokens():
    told = [None, {"6": {"logprob": -1.5}, "1": {"logprob": -0.1}}, {"7": {"logprob": -2.5}}]
    body = json.dumps({"choices": [{"prompt_logprobs": told}]}).encode()
    assert prompt_logprobs(body, PROMPT).tolist() == [-1.5, -2.5]
    for wrong in (told[:2], [None, {"1": {"logprob": -0.1}}, told[2]], [None, None, told[2]]):
        with pytest.raises(UnusableAnswer):
            prompt_logprobs(json.dumps({"choices": [{"prompt_logprobs": wrong}]}).encode(), PROMPT)
