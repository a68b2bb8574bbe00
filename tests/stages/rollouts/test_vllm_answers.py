"""What is believed of a server's answer: only that every id and every logprob is there, and fits."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.rollouts.engines.base import GenerationRequest, SamplingParams
from stages.rollouts.workers.answers import forced_logprob, prompt_logprobs, sampled, sampling_of
from stages.rollouts.workers.dialects import CompletionsApi, Dialect, TokenApi, UnusableAnswer

PROMPT = np.array([5, 6, 7], dtype=np.int32)
SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(2, 9))
REQUEST = GenerationRequest(PROMPT, SAMPLING, seed=2**63 + 5)
VOCABULARY = 40
IDS = [11, 12, 13, 14]
DIALECTS: list[Dialect] = [TokenApi(), CompletionsApi()]
of_both = pytest.mark.parametrize("dialect", DIALECTS, ids=["tokens", "completions"])


def answer(dialect, ids=IDS, reason="length", prompt=PROMPT, logprobs=None, owners=None):
    """An answer as vLLM writes it."""
    ids, prompt = list(ids), None if prompt is None else list(map(int, prompt))
    logprobs = [-0.25 - n for n in range(len(ids))] if logprobs is None else logprobs
    owners = ids if owners is None else owners
    choice = {"token_ids": ids, "finish_reason": reason}
    if isinstance(dialect, TokenApi):
        pairs = zip(owners, logprobs, strict=False)
        content = [{"token_id": owner, "logprob": logprob, "top_logprobs": []} for owner, logprob in pairs]
        return json.dumps(
            {"prompt_token_ids": prompt, "choices": [choice | {"logprobs": {"content": content}}]}
        ).encode()
    names = [f"token_id:{owner}" for owner in owners]
    choice |= {"prompt_token_ids": prompt, "logprobs": {"token_logprobs": logprobs, "tokens": names}}
    return json.dumps({"choices": [choice]}).encode()


def read(dialect, body):
    return sampled(dialect.read(body), REQUEST, VOCABULARY)


@of_both
def test_ids_and_logprobs_come_out_as_they_were_sampled(dialect):
    found = read(dialect, answer(dialect))
    assert found.response_ids.tolist() == [11, 12, 13, 14]
    assert found.logprobs.tolist() == [-0.25, -1.25, -2.25, -3.25]
    assert (found.response_ids.dtype, found.logprobs.dtype) == (np.int32, np.float32)
    assert found.finish_reason == "length"


@pytest.mark.parametrize("ids", [[2], [11, 9], [11, 12, 13, 2]])
@of_both
def test_a_sampled_stop_token_is_kept(ids, dialect):
    found = read(dialect, answer(dialect, ids, "stop"))
    assert found.response_ids.tolist() == ids
    assert found.finish_reason == "stop"


@of_both
def test_an_answer_that_stops_at_its_last_token_has_stopped_whichever_limit_the_server_names(dialect):
    assert read(dialect, answer(dialect, [11, 12, 13, 2], "length")).finish_reason == "stop"


@of_both
def test_an_answer_may_end_at_a_text_where_one_was_given(dialect):
    request = replace(REQUEST, sampling=replace(SAMPLING, stop_texts=("x", "yz")))
    found = sampled(dialect.read(answer(dialect, [11, 12], "stop")), request, VOCABULARY)
    assert (found.response_ids.tolist(), found.finish_reason) == ([11, 12], "stop")
    for ids, reason in (([11, 12], "length"), ([2, 12], "stop"), ([11, 12], "abort")):
        with pytest.raises(UnusableAnswer):
            sampled(dialect.read(answer(dialect, ids, reason)), request, VOCABULARY)
    body = dialect.body([5, 6, 7], sampling_of(request))
    asked = body.get("sampling_params", body)
    assert (asked["stop"], asked["include_stop_str_in_output"], asked.get("detokenize", True)) == (
        ["x", "yz"],
        True,
        True,
    )
    assert "stop" not in sampling_of(REQUEST)


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
@of_both
def test_an_end_that_does_not_fit_the_ids_is_refused(ids, reason, dialect):
    with pytest.raises(UnusableAnswer):
        read(dialect, answer(dialect, ids, reason))


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
    ],
)
@of_both
def test_a_logprob_that_is_missing_or_none_is_never_padded(logprobs, dialect):
    owners = [11, 12, 13, 14, 15][: len(logprobs)]
    with pytest.raises(UnusableAnswer):
        read(dialect, answer(dialect, logprobs=logprobs, owners=owners))


@of_both
@pytest.mark.parametrize("told", [None, {}, {"content": None}, {"content": [{}] * 4}, {"tokens": None}, [], 3])
def test_an_answer_without_logprobs_is_refused(told, dialect):
    whole = json.loads(answer(dialect))
    whole["choices"][0]["logprobs"] = told
    with pytest.raises(UnusableAnswer):
        read(dialect, json.dumps(whole).encode())


@pytest.mark.parametrize("owners", [[11, 12, 13, 15], [11, 12, 13], ["a", "b", "c", "d"], [None] * 4])
@of_both
def test_logprobs_must_say_that_they_belong_to_the_sampled_tokens(owners, dialect):
    with pytest.raises(UnusableAnswer):
        read(dialect, answer(dialect, logprobs=[-1.0] * 4, owners=owners))


@pytest.mark.parametrize("prompt", [[1, 5, 6, 7], [5, 6], [], None, [5, 6, 8]])
@of_both
def test_a_prompt_that_was_read_otherwise_is_refused(prompt, dialect):
    with pytest.raises(UnusableAnswer):
        read(dialect, answer(dialect, prompt=prompt))


_json = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["choices", "token_ids", "logprobs"]), inner),
)


@given(st.binary(max_size=60) | _json.map(lambda value: json.dumps(value).encode()), st.sampled_from(DIALECTS))
def test_garbage_is_unusable_and_nothing_else(body, dialect):
    for believe in (
        lambda told: sampled(told, REQUEST, VOCABULARY),
        lambda told: prompt_logprobs(told, PROMPT),
        lambda told: forced_logprob(told, 3),
    ):
        with pytest.raises(UnusableAnswer):
            believe(dialect.read(body))


@of_both
def test_a_request_leaves_nothing_to_a_servers_defaults(dialect):
    body = dialect.body([5, 6, 7], sampling_of(replace(REQUEST, sampling=replace(SAMPLING, top_k=None))))
    asked = body.get("sampling_params", body)
    assert body.get("token_ids", body.get("prompt")) == [5, 6, 7]
    assert asked["seed"] == 5
    assert asked["stop_token_ids"] == [2, 9]
    assert asked["ignore_eos"]
    assert (asked["top_k"], asked["top_p"], asked["min_p"], asked["repetition_penalty"]) == (-1, 1.0, 0.0, 1.0)
    assert sampling_of(replace(REQUEST, sampling=replace(SAMPLING, top_k=7)))["top_k"] == 7


@of_both
def test_prompt_logprobs_are_those_of_the_prompts_own_tokens(dialect):
    def body(told):
        choice = {} if isinstance(dialect, TokenApi) else {"prompt_logprobs": told}
        whole = {"prompt_logprobs": told} if isinstance(dialect, TokenApi) else {}
        return json.dumps(whole | {"choices": [choice]}).encode()

    told = [None, {"6": {"logprob": -1.5}, "1": {"logprob": -0.1}}, {"7": {"logprob": -2.5}}]
    assert prompt_logprobs(dialect.read(body(told)), PROMPT).tolist() == [-1.5, -2.5]
    for wrong in (told[:2], [None, {"1": {"logprob": -0.1}}, told[2]], [None, None, told[2]], None):
        with pytest.raises(UnusableAnswer):
            prompt_logprobs(dialect.read(body(wrong)), PROMPT)
