"""The completions API: prompts without a template go on from the sampled ids, as far as a client keeps them."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollouts.calls import ModelCall
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines.base import SamplingParams
from stages.rollouts.engines.scripted import ScriptedEngine
from stages.rollouts.session import Session
from tests.stages.rollouts.conversations import scripted, whole_sequences
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

AGENTS = "tests/stages/rollouts/completion_agents.py"


@pytest.fixture
def shelf(memory_store, policy):
    return memory_store, stored_tasks(memory_store, 1), stored_policy(memory_store, policy)


def made(shelf, agent, **config):
    """What the agent returned, and its steps."""
    store, tasks, policy = shelf
    manifest = rolled_out(store, request(tasks, policy, {"agent": f"{AGENTS}:{agent}", **config})).manifest
    episodes = frame(store, manifest, "episodes")
    assert set(episodes["status"]) <= {"completed", "truncated"}, episodes["error"].to_list()
    return json.loads(episodes["artifacts"][0]), frame(store, manifest, "steps")


def test_a_prompt_that_grows_goes_on_from_all_that_was_sampled(shelf, policy):
    engine = scripted(policy, "I add.\nObservation: 3, so it is 3")
    told, steps = made(shelf, "acts_and_observes", engine=engine, sampling={"max_tokens": 60})
    template = chat_template_in(policy.folder)
    rows = steps.sort("step_index").to_dicts()
    for one, row in zip(told["told"], rows, strict=True):
        assert one == {"text": "I add.", "reason": "stop", "usage": len(row["response_ids"])}
        assert row["response"] == "I add."
    sequences = whole_sequences(steps)
    for (prompt, sampled), (following, _), row in zip(sequences, sequences[1:], rows[1:], strict=False):
        assert following[: row["prefix_length"]] == [*prompt, *sampled]
    (added,) = json.loads(rows[2]["messages"])
    assert added == {"role": "user", "content": " 1\n"}
    whole = template.decode_whole(np.array([*sequences[2][0]]))
    opening = json.loads(rows[0]["messages"])[0]["content"]
    assert whole == f"{opening}I add.\nObservation: 0\nI add.\nObservation: 1\n"


def test_several_prompts_are_answered_in_their_order_whole_and_as_a_stream(shelf, policy):
    told, steps = made(shelf, "several_prompts")
    template = chat_template_in(policy.folder)
    rows = steps.sort("step_index").to_dicts()
    asked = [json.loads(row["messages"])[0]["content"] for row in rows]
    assert asked == ["one ", "one ", "two ", "two "] * 2
    assert told["texts"] == [row["response"] for row in rows[:4]]
    assert told["streamed"] == [row["response"] for row in rows[4:]]
    assert np.allclose(np.concatenate(told["logprobs"]), np.concatenate([row["logprobs"] for row in rows[:4]]))
    n_prompt = len(template.encode("one ")) + len(template.encode("two "))
    assert told["usage"] == [
        n_prompt,
        sum(len(row["response_ids"]) for row in rows[:4]),
        sum(len(row["response_ids"]) for row in rows[4:]),
    ]


def test_ids_are_the_prompt_as_they_are(shelf):
    told, steps = made(shelf, "token_ids")
    prompts = [prompt for prompt, _ in whole_sequences(steps)]
    assert prompts == [[70, 71, 300, 72], [70, 71, 300, 72, 80], [9]]
    assert told["texts"] == steps.sort("step_index")["response"].to_list()


def test_what_is_wrong_with_a_request_is_said(shelf):
    told, steps = made(shelf, "wrong_calls")
    assert len(steps) == 0
    said = told["told"]
    assert [status for status, _ in said] == [400] * 12 + [404]
    assert "prompt[1] must be a text or a list of token ids" in said[3][1]
    assert "ids that are not below 304" in said[5][1]
    assert "leaves no room" in said[6][1]
    assert "128 answers in all" in said[7][1]
    assert "only the logprob of the token that was sampled" in said[11][1]


@settings(max_examples=150, deadline=None)
@given(
    first=st.lists(st.integers(0, 299), min_size=1, max_size=20),
    share=st.just(1.0) | st.floats(0, 1),
    added=st.sampled_from(["", " and", "12", "\n", "é"]),
    with_end=st.booleans(),
)
def test_whatever_a_client_keeps_of_an_answer_the_prompt_reads_as_it_was_written(policy, first, share, added, with_end):
    template = chat_template_in(policy.folder)
    answers = iter([first, [70, 2]])
    heard = []

    def script(request, vocabulary):
        heard.append(request.prompt_ids.tolist())
        return next(answers)

    engine = ScriptedEngine(script)
    engine.load(policy)
    session = Session(
        "default", template=template, engine=engine, policy_id=policy.policy_id,
        sampling=SamplingParams(max_tokens=30, stop_token_ids=(2,)), max_turns=None, seed=3, uid="e",
    )  # fmt: skip
    answer = asyncio.run(session.call(ModelCall(prompt="what is 12?")))
    assert answer.response_ids is not None
    sampled = answer.response_ids.tolist()
    end = "<|im_end|>" if with_end and sampled[-1] == 2 and share == 1 else ""
    kept = answer.content[: round(share * len(answer.content))]
    written = f"what is 12?{kept}{end}{added}"
    asyncio.run(session.call(ModelCall(prompt=written)))
    plain = [token for token in heard[1] if token not in (0, 1)]  # special tokens that were sampled have no text
    ended = template.decode_whole(np.array(plain)) if plain[-1:] else ""
    if "\ufffd" not in kept and 2 not in sampled[:-1]:
        assert ended == written
    n = len(heard[0])
    assert heard[1][:n] == heard[0] or not kept
    steps = session.steps()
    assert [*heard[0], *sampled][: steps[1].prefix_length] + steps[1].prompt_ids.tolist() == heard[1]
    if share == 1 and answer.content:
        assert steps[1].prefix_length >= n + len(sampled) - (sampled[-1] == 2)
