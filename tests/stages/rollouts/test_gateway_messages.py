"""Agents with Anthropic's own client, unchanged: what they get, and what is recorded of it."""

import json

import pytest

from stages.rollouts.chat_template import chat_template_in
from tests.stages.rollouts.conversations import CALL, make_tool_policy, scripted, whole_sequences
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

AGENTS = "tests/stages/rollouts/anthropic_agents.py"


@pytest.fixture
def shelf(memory_store, policy):
    return memory_store, stored_tasks(memory_store, 2), stored_policy(memory_store, policy)


def made(shelf, agent, **config):
    """What the agents returned, and the episodes and steps."""
    store, tasks, policy = shelf
    manifest = rolled_out(store, request(tasks, policy, {"agent": f"{AGENTS}:{agent}", **config})).manifest
    episodes, steps = frame(store, manifest, "episodes"), frame(store, manifest, "steps")
    assert set(episodes["status"]) <= {"completed", "truncated"}, episodes["error"].to_list()
    return [json.loads(text) for text in episodes["artifacts"]], episodes, steps


def test_turns_continue_from_the_ids_that_were_sampled(shelf, policy):
    returned, episodes, steps = made(shelf, "two_turns")
    template = chat_template_in(policy.folder)
    for told, episode_id in zip(returned, episodes["episode_id"], strict=True):
        own = steps.filter(episode_id=episode_id).sort("step_index")
        (before, answer), (prompt, sampled) = whole_sequences(own)
        assert prompt[: len(before) + len(answer)] == [*before, *answer]
        assert told["usage"] == [len(prompt), len(sampled)]
        assert told["reason"] == {"stop": "end_turn", "length": "max_tokens"}[own["finish_reason"][1]]
        opening = json.loads(own["messages"][0])
        assert [message["role"] for message in opening] == ["system", "user"]
        assert template.opening(opening)[1].tolist() == before


def test_a_stream_says_what_is_recorded(shelf):
    returned, _, steps = made(shelf, "streams")
    for told, row in zip(returned, steps.sort("episode_id").iter_rows(named=True), strict=True):
        assert told == {"text": row["response"], "sampled": len(row["response_ids"])}


def test_tool_calls_and_their_results_go_there_and_back(memory_store, tmp_path):
    tool_policy = make_tool_policy(tmp_path / "policy")
    shelf = (memory_store, stored_tasks(memory_store, 1), stored_policy(memory_store, tool_policy))
    engine = scripted(tool_policy, CALL)
    (told,), _, steps = made(shelf, "uses_a_tool", engine=engine, sampling={"max_tokens": 200})
    assert told == {"reason": "tool_use", "blocks": ["thinking", "text", "tool_use"]}
    first, second = steps.sort("step_index").iter_rows(named=True)
    assert second["prefix_length"] == len(first["prompt_ids"]) + len(first["response_ids"])
    (result,) = json.loads(second["messages"])
    (call,) = json.loads(first["tool_calls"])
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "5", call["id"])


def test_an_answer_names_the_stop_text_before_which_it_ends(memory_store, policy):
    shelf = (memory_store, stored_tasks(memory_store, 1), stored_policy(memory_store, policy))
    engine = scripted(policy, "so it is 19</answer> or not")
    (told,), _, steps = made(shelf, "stops_at_a_text", engine=engine, sampling={"max_tokens": 60})
    assert told["told"] == [["so it is 19", "stop_sequence", "</answer>"]] * 2
    assert steps["response"].to_list() == ["so it is 19"] * 2


def test_refusals_are_in_the_apis_own_form_and_no_steps(shelf):
    returned, _, steps = made(shelf, "wrong_calls")
    assert len(steps) == 0
    for told in (one["told"] for one in returned):
        assert [(name, status) for name, status, _ in told] == [
            ("NotFoundError", 404),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("BadRequestError", 400),
            ("AuthenticationError", 401),
        ]
        assert "there is no model 'claude'" in told[0][2]
        assert "leaves no room" in told[3][2]
