"""Agents with the official client of the chat API, unchanged: what they get, and what is recorded of it."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from stages.rollouts.chat_template import chat_template_in
from tests.stages.rollouts.conversations import CALL, make_tool_policy, scripted, whole_sequences
from tests.stages.rollouts.policies import forward_logprobs
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

AGENTS = "tests/stages/rollouts/openai_agents.py"


def made(shelf, agent, **config):
    """Episodes and steps of the agent's attempts, one at each of two tasks."""
    store, tasks, policy = shelf
    manifest = rolled_out(store, request(tasks, policy, {"agent": f"{AGENTS}:{agent}", **config})).manifest
    return frame(store, manifest, "episodes"), frame(store, manifest, "steps")


@pytest.fixture
def shelf(memory_store, policy):
    return memory_store, stored_tasks(memory_store, 2), stored_policy(memory_store, policy)


@pytest.fixture
def tool_policy(tmp_path: Path):
    return make_tool_policy(tmp_path / "policy")


def returned(episodes):
    assert set(episodes["status"]) <= {"completed", "truncated"}, episodes["error"].to_list()
    return [json.loads(text) for text in episodes["artifacts"]]


def test_turns_continue_from_the_ids_that_were_sampled(shelf, policy):
    episodes, steps = made(shelf, "three_turns")
    assert len(steps) == 6
    for episode in episodes.iter_rows(named=True):
        own = steps.filter(episode_id=episode["episode_id"])
        sequences = whole_sequences(own)
        for (prompt, sampled), (following, _) in pairwise(sequences):
            assert following[: len(prompt) + len(sampled)] == [*prompt, *sampled]
        told = json.loads(episode["artifacts"])
        assert told["usage"]["completion_tokens"] == len(sequences[-1][1])
        assert told["usage"]["prompt_tokens"] == len(sequences[-1][0])
        assert told["model"] == own["policy_id"][0][:12]
        prompt, sampled = sequences[-1]
        expected = forward_logprobs(policy.folder, np.array([*prompt, *sampled], np.int32))[-len(sampled) :]
        assert np.abs(np.array(own["logprobs"][-1].to_list()) - expected).max() < 1e-4
    assert set(steps["temperature"]) == {1.0}, "the stage's, whatever the agent sends"


def test_http_and_in_process_calls_sample_the_same(shelf):
    _, over_http = made(shelf, "three_turns")
    store, tasks, policy = shelf
    config = {"agent": "tests/stages/rollouts/given_agents.py:three_turns"}
    inside = frame(store, rolled_out(store, request(tasks, policy, config)).manifest, "steps")
    prompts = [set(map(tuple, steps.filter(step_index=0)["prompt_ids"].to_list())) for steps in (over_http, inside)]
    assert prompts[0] == prompts[1]


def test_a_stream_says_what_is_recorded(shelf, policy):
    episodes, steps = made(shelf, "streams")
    template = chat_template_in(policy.folder)
    for told, row in zip(returned(episodes), steps.sort("episode_id").iter_rows(named=True), strict=True):
        ids = row["response_ids"]
        assert told["sampled"] == len(ids)
        assert told["reasons"] == [row["finish_reason"]]
        assert told["text"] == row["response"]
        assert template.decode(np.array(ids)).startswith(told["text"])


def test_tool_calls_and_reasoning_are_taken_out_and_the_next_prompt_holds_what_was_sampled(memory_store, tool_policy):
    shelf = (memory_store, stored_tasks(memory_store, 1), stored_policy(memory_store, tool_policy))
    engine = scripted(tool_policy, CALL)
    episodes, steps = made(shelf, "uses_a_tool", engine=engine, sampling={"max_tokens": 200})
    (told,) = returned(episodes)
    assert told == {"reason": "tool_calls", "content": "let me see"}
    first, second = steps.sort("step_index").iter_rows(named=True)
    assert first["finish_reason"] == "tool_calls"
    assert (first["response"], first["reasoning"]) == ("let me see", "hm")
    (call,) = json.loads(first["tool_calls"])
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert first["response_ids"] == engine["replies"][0]
    assert second["prefix_length"] == len(first["prompt_ids"]) + len(first["response_ids"])
    (result,) = json.loads(second["messages"])
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "5", call["id"])


def test_a_policy_that_must_call_a_tool_is_shown_the_tools_and_decides(memory_store, tool_policy):
    shelf = (memory_store, stored_tasks(memory_store, 1), stored_policy(memory_store, tool_policy))
    episodes, steps = made(shelf, "chooses_its_tools")
    (told,) = returned(episodes)
    (shown,), (hidden,) = set(told["told"][:3] + told["told"][4:7]), set(told["told"][3::4])
    assert shown > hidden
    assert steps["tool_calls"].null_count() == 8, "it has called none"


def test_an_answer_ends_before_a_stop_text_and_is_continued_from_all_that_was_sampled(memory_store, policy):
    shelf = (memory_store, stored_tasks(memory_store, 1), stored_policy(memory_store, policy))
    engine = scripted(policy, "I add.\nObservation: 3, so it is 3")
    episodes, steps = made(shelf, "stops_at_a_text", engine=engine, sampling={"max_tokens": 60})
    (told,) = returned(episodes)
    assert told == {"told": ["I add."] * 2, "reasons": ["stop"] * 2}
    _, second, third = steps.sort("step_index").iter_rows(named=True)
    template = chat_template_in(policy.folder)
    assert second["response"] == "I add."
    assert template.decode(np.array(second["response_ids"])).startswith("I add.\nObservation:")
    assert len(second["response_ids"]) < len(engine["replies"][0])
    (_, _), (prompt, sampled), (following, _) = whole_sequences(steps)
    assert following[: third["prefix_length"]] == [*prompt, *sampled]


def test_concurrent_calls_belong_to_the_role_that_made_them(shelf):
    episodes, steps = made(shelf, "several_at_once")
    for told, episode_id in zip(returned(episodes), episodes["episode_id"], strict=True):
        own = steps.filter(episode_id=episode_id)
        by_role = {name[0]: rows for name, rows in own.group_by("trajectory")}
        assert {name: len(rows) for name, rows in by_role.items()} == {
            "solver-0": 1, "solver-1": 1, "judge": 2, "default": 2,
        }  # fmt: skip
        for role in ("solver-0", "solver-1", "judge"):
            for messages in by_role[role]["messages"]:
                assert json.loads(messages)[-1]["content"] == role
        choices = by_role["default"].sort("step_index")
        assert choices["response"].to_list() == told["texts"]
        assert [len(one) for one in told["logprobs"]] == [len(one) for one in choices["logprobs"]]
        assert np.allclose(np.concatenate(told["logprobs"]), np.concatenate(choices["logprobs"].to_numpy()))
        assert choices["prompt_ids"][0].len() > 0


def test_a_header_names_the_role_too(shelf):
    _, steps = made(shelf, "by_header")
    assert set(steps["trajectory"]) == {"critic"}


def test_calls_in_a_block_of_a_role_belong_to_that_role(shelf):
    _, steps = made(shelf, "by_context")
    counts = dict(steps.filter(episode_id=steps["episode_id"][0]).group_by("trajectory").len().rows())
    assert counts == {"default": 2, "judge-0": 3, "judge-1": 3, "inner": 2}
    lasts = steps.filter(step_index=2)["messages"].to_list()
    assert len(lasts) == 4
    assert all(json.loads(messages)[-1]["content"] == "last" for messages in lasts)


def test_refusals_are_in_the_apis_own_form_and_no_steps(shelf):
    episodes, steps = made(shelf, "wrong_calls")
    assert len(steps) == 2, "the good call of each"
    for told in (one["told"] for one in returned(episodes)):
        assert [(name, status) for name, status, _ in told] == [
            ("NotFoundError", 404),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("AuthenticationError", 401),
        ]
        said = [message for _, _, message in told]
        assert "there is no model 'gpt-4'" in said[0]
        assert "messages[0]" in said[2]
        assert "parts of type text only" in said[3]
        assert "the policy's context of 256 leaves no room" in said[4]
        assert "stop must be a text" in said[6]
        assert "only the logprob of the token that was sampled" in said[7]
        assert "there are no tools" in said[8]
        assert "there is no tool 'subtract' in tools" in said[9]
        assert "auto, none, required, or name a tool" in said[10]
        assert "tools must be a list" in said[11]


def test_hostile_requests_are_refused_in_the_apis_own_form(shelf):
    episodes, steps = made(shelf, "hostile_requests")
    for told in (one["told"] for one in returned(episodes)):
        assert told == [
            [400, "invalid_json"],
            [400, "invalid_json"],
            [400, "invalid_json"],
            [400, "invalid_json"],
            [400, "invalid_json"],
            [401, "invalid_api_key"],
            [200, None],
        ]
    assert len(steps) == 2


def test_too_many_calls_end_the_episode_as_it_does_in_process(shelf):
    episodes, steps = made(shelf, "calls_too_often", max_turns=2)
    assert set(episodes["status"]) == {"max_turns"}
    assert len(steps) == 4


def test_a_hung_agent_is_ended_and_keeps_its_steps(shelf):
    episodes, steps = made(shelf, "hangs_after_a_call", episode_time_limit_s=6)
    assert set(episodes["status"]) == {"timeout"}
    assert len(steps) == 2


def test_a_call_that_its_client_gave_up_is_no_step(shelf):
    episodes, steps = made(shelf, "hangs_up", sampling={"max_tokens": 200})
    returned_nothing = episodes.filter(pl.col("artifacts").is_null())
    assert len(returned_nothing) == 2
    assert len(steps) == 2


def test_an_agent_samples_as_it_wishes_only_where_it_may(shelf):
    _, steps = made(shelf, "wishes")
    assert set(steps["temperature"]) == {1.0}
    _, steps = made(shelf, "wishes", agent_samples=True)
    assert set(steps["temperature"]) == {0.25}
    assert steps["response_ids"].list.len().max() <= 3


def test_a_session_cannot_be_used_by_another_episode(shelf):
    episodes, steps = made(shelf, "spies")
    assert [told["answer"] for told in returned(episodes)] == ["AuthenticationError"] * 2
    assert len(steps) == 0


def test_the_responses_api_continues_from_what_was_sampled_too(shelf):
    episodes, steps = made(shelf, "two_responses")
    for told, episode_id in zip(returned(episodes), episodes["episode_id"], strict=True):
        own = steps.filter(episode_id=episode_id).sort("step_index")
        (before, answer), (prompt, sampled) = whole_sequences(own)
        assert prompt[: len(before) + len(answer)] == [*before, *answer]
        assert told["usage"] == [len(prompt), len(sampled)]
        assert told["text"] == own["response"][1]
        assert told["status"] == {"stop": "completed", "length": "incomplete"}[own["finish_reason"][1]]


def test_a_stream_of_the_responses_api_has_reasoning_text_and_calls_of_tools(memory_store, tool_policy):
    shelf = (memory_store, stored_tasks(memory_store, 1), stored_policy(memory_store, tool_policy))
    engine = scripted(tool_policy, CALL)
    agent = "streams_a_response_with_a_tool"
    episodes, steps = made(shelf, agent, engine=engine, sampling={"max_tokens": 200})
    (told,) = returned(episodes)
    assert told["items"] == ["reasoning", "message", "function_call"]
    assert told["kinds"][0] == "response.created"
    assert told["kinds"][-1] == "response.completed"
    first, second = steps.sort("step_index").iter_rows(named=True)
    assert second["prefix_length"] == len(first["prompt_ids"]) + len(first["response_ids"])
    (result,) = json.loads(second["messages"])
    (call,) = json.loads(first["tool_calls"])
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "5", call["id"])


def test_what_the_responses_api_cannot_do_here_is_refused(shelf):
    episodes, steps = made(shelf, "wrong_responses")
    assert len(steps) == 0
    for told in (one["told"] for one in returned(episodes)):
        assert [status for status, _ in told] == [400, 400, 400]
        assert "send the whole conversation" in told[1][1]
        assert "input[0]" in told[2][1]
