"""Answers in a JSON form: what is asked of a server, what is refused, and in which words."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from stages.rollouts.engines import close_engines
from stages.rollouts.engines.base import GenerationRequest, Probe, SamplingParams
from stages.rollouts.engines.scripted import ScriptedEngine, drawn_ids
from stages.rollouts.journal import journalled
from tests.stages.rollouts.json_agents import SCHEMA
from tests.stages.rollouts.stand_in import StandIn
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks
from tests.stages.rollouts.test_vllm_stage import CONTEXT, VLLM, VOCABULARY, attached

AGENTS = "tests/stages/rollouts/json_agents.py"


@pytest.fixture
def shelf(memory_store, policy):
    return memory_store, stored_tasks(memory_store, 1), stored_policy(memory_store, policy)


@pytest.fixture
def server():
    made = StandIn(VOCABULARY, CONTEXT)
    yield made
    close_engines()
    made.close()


def refusals(shelf, **config):
    store, tasks, policy = shelf
    manifest = rolled_out(store, request(tasks, policy, {"agent": f"{AGENTS}:refused", **config})).manifest
    (episode,) = frame(store, manifest, "episodes").iter_rows(named=True)
    assert len(frame(store, manifest, "steps")) == 1, "the good call"
    return json.loads(episode["artifacts"])["told"], frame(store, manifest, "call_errors")


def test_a_schema_that_is_none_is_refused_in_the_apis_own_form(shelf):
    told, errors = refusals(shelf)
    assert told[:3] == [
        ["invalid_json_schema", "response_format"],
        ["invalid_json_schema", "response_format"],
        [None, "response_format"],
    ]
    assert told[4] == ["invalid_json_schema", "text.format"]
    assert told[5][0] == "invalid_request_error"
    assert "output_config.format has no JSON schema: $.type: 'text' is not valid" in told[5][1]
    assert len(errors) == 7


@pytest.mark.parametrize("engine", [{}, {"engine": {"type": "scripted", "replies": [[5, 2]]}}])
def test_an_engine_that_cannot_keep_to_a_schema_says_so(shelf, engine):
    told, _ = refusals(shelf, **engine)
    assert told[6] == ["unsupported", None]


@pytest.fixture
def uniform_shelf(memory_store, policy):
    """With a policy that stand-ins serve."""
    uniform = [np.full(len(ids) - 1, -np.log(VOCABULARY), dtype=np.float32) for ids in policy.probe.ids]
    stored = stored_policy(memory_store, replace(policy, probe=Probe(policy.probe.ids, uniform)))
    return memory_store, stored_tasks(memory_store, 1), stored


def test_a_server_is_given_the_schema_with_its_keys_in_their_order(server, uniform_shelf):
    store, tasks, stored = uniform_shelf
    asked = request(tasks, stored, {"agent": f"{AGENTS}:refused", "engine": VLLM}, attached([server]))
    manifest = rolled_out(store, asked).manifest
    (episode,) = frame(store, manifest, "episodes").iter_rows(named=True)
    told = json.loads(episode["artifacts"])["told"]
    assert told[3] == ["unsupported", None], "a schema with tools, which it would rule out"
    assert told[6] == ["answered", None]
    forms = [body.get("structured_outputs") for body in server.asked]
    assert forms == [{"json": json.dumps(SCHEMA, ensure_ascii=False)}, None]
    modes = frame(store, manifest, "steps").sort("step_index")["logprob_mode"].to_list()
    assert modes == ["constrained", "raw"]


def test_a_schema_that_a_server_does_not_take_is_one_calls_error(server, uniform_shelf):
    store, tasks, stored = uniform_shelf
    server.fault = "refuses schemas"
    asked = request(tasks, stored, {"agent": f"{AGENTS}:unsupported_by_the_server", "engine": VLLM}, attached([server]))
    manifest = rolled_out(store, asked).manifest
    (episode,) = frame(store, manifest, "episodes").iter_rows(named=True)
    assert json.loads(episode["artifacts"]) == {"code": "invalid_json_schema"}
    (error,) = frame(store, manifest, "call_errors").iter_rows(named=True)
    assert (error["kind"], error["status"]) == ("SchemaRefused", "refused")
    assert "this grammar is not supported" in error["message"]
    assert len(frame(store, manifest, "steps")) == 1


def test_the_journal_knows_an_answer_under_a_schema_from_one_without(policy):
    engine = ScriptedEngine(drawn_ids(4))
    engine.load(policy)
    free = GenerationRequest(np.array([5, 6], np.int32), SamplingParams(max_tokens=4), seed=1)
    kept = replace(free, sampling=replace(free.sampling, json_schema="{}"))
    killed = journalled(engine, "a" * 32, "0")
    asyncio.run(killed.__enter__().generate(free))
    with journalled(engine, "a" * 32, "0") as second:
        asyncio.run(second.generate(kept))
        assert second.n_replayed == 0
        asyncio.run(second.generate(free))
        assert second.n_replayed == 1
