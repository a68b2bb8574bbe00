"""Answers that are told while they are sampled: what arrives, and that it is what is recorded."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollouts.formats import parsed, sure
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

AGENTS = "tests/stages/rollouts/streaming_agents.py"
TEMPLATES = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>", "none": ""}
PARTS = ["<think>", "</think>", "<tool_call>", '{"name": "add", "arguments": {}}', "</tool_call>", "[TOOL_CALLS]", "[",
         "]", "<|python_tag|>", ";\n", " ", "\n", "so", "<", "{"]  # fmt: skip


def test_text_arrives_in_pieces_through_each_api_and_they_are_what_is_recorded(memory_store, policy):
    tasks, stored = stored_tasks(memory_store, 2), stored_policy(memory_store, policy)
    config = {"agent": f"{AGENTS}:through_each_api", "sampling": {"max_tokens": 120}}
    check_pieces(memory_store, rolled_out(memory_store, request(tasks, stored, config)).manifest)


def check_pieces(store, manifest):
    """Of the agent that streams through each API."""
    episodes, steps = frame(store, manifest, "episodes"), frame(store, manifest, "steps")
    assert set(episodes["status"]) <= {"completed", "truncated"}, episodes["error"].to_list()
    for episode in episodes.iter_rows(named=True):
        told = json.loads(episode["artifacts"])
        own = steps.filter(episode_id=episode["episode_id"]).sort("step_index")
        assert ["".join(pieces) for pieces in told["pieces"]] == own["response"].to_list()
        assert told["finals"] == own["response"].to_list()[2:]
        assert np.allclose(told["logprobs"], own["logprobs"][0].to_list())
        assert max(map(len, told["pieces"])) > 2, "on a machine that is busy, pieces come together"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=9), is_thinking=st.booleans(), has_tools=st.booleans())
def test_what_was_told_is_how_the_answer_begins(template, parts, is_thinking, has_tools):
    text, names = "".join(parts), frozenset({"add"} if has_tools else ())
    whole = parsed(text, template, names, is_thinking)
    told = ("", "")
    for n in range(len(text) + 1):
        now = sure(text[:n], template, names, is_thinking)
        assert all(after.startswith(before) for before, after in zip(told, now, strict=True))
        told = now
    assert (whole.reasoning or "").startswith(told[0])
    assert whole.content.startswith(told[1])
