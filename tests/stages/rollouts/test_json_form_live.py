"""Answers in a JSON form from real vLLM, through the official clients."""

import json

import numpy as np
import pytest

from stages.artifacts.store import open_store
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines import close_engines
from tests.stages.rollouts.conversations import whole_sequences
from tests.stages.rollouts.json_agents import Verdict
from tests.stages.rollouts.policies import forward_logprobs
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

AGENTS = "tests/stages/rollouts/json_agents.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory, attached, live_policy):
    """Runs an agent at two tasks: its episodes, steps and failed calls."""
    store = open_store(tmp_path_factory.mktemp("store"))
    tasks, stored = stored_tasks(store, 2), stored_policy(store, live_policy)

    def run(agent):
        config = {"agent": f"{AGENTS}:{agent}", "engine": {"type": "vllm"}, "sampling": {"max_tokens": 120}}
        manifest = rolled_out(store, request(tasks, stored, config, attached(live_policy))).manifest
        return [frame(store, manifest, table) for table in ("episodes", "steps", "call_errors")]

    yield run
    close_engines()


def test_each_api_gives_an_answer_of_the_form_and_what_was_sampled_is_recorded(made, live_policy):
    episodes, steps, _ = made("in_a_form")
    assert set(episodes["status"]) == {"completed"}, episodes["error"].to_list()
    template = chat_template_in(live_policy.folder)
    for episode in episodes.iter_rows(named=True):
        own = steps.filter(episode_id=episode["episode_id"]).sort("step_index")
        assert [Verdict.model_validate_json(text).model_dump() for text in own["response"]] == json.loads(
            episode["artifacts"]
        )["told"]
        for row, (prompt, sampled) in zip(own.iter_rows(named=True), whole_sequences(own), strict=True):
            assert template.decode(np.array(sampled)) == row["response"]
            models_own = forward_logprobs(live_policy.folder, np.array([*prompt, *sampled], np.int32))[-len(sampled) :]
            given = np.array(row["logprobs"])
            # What the schema has left shares the whole mass, so the modes must not be taken for each other.
            assert row["logprob_mode"] == "constrained"
            assert (given >= models_own - 1e-3).all()
            assert np.exp(given).prod() > 100 * np.exp(models_own).prod()


def test_any_object_is_a_form_too(made):
    episodes, _, _ = made("any_object")
    for told in map(json.loads, episodes["artifacts"]):
        assert told["text"].lstrip().startswith("{")
        assert told["reason"] != "stop" or isinstance(json.loads(told["text"]), dict)


def test_a_schema_that_vllm_does_not_take_is_one_calls_error(made):
    episodes, steps, errors = made("unsupported_by_the_server")
    assert [json.loads(one) for one in episodes["artifacts"]] == [{"code": "invalid_json_schema"}] * 2
    assert len(steps) == 2
    assert set(errors["kind"]) == {"SchemaRefused"}
