"""Roles of one episode that are answered by different policies."""

import numpy as np
import pytest

from schemas.config import validated
from schemas.errors import ConfigError
from stages.artifacts.commit import prepare
from stages.rollouts.config import RolloutsConfig, RolloutsExecution
from stages.rollouts.role_policies import served_by
from tests.stages.rollouts.conversations import whole_sequences
from tests.stages.rollouts.policies import forward_logprobs
from tests.stages.rollouts.stored import AGENTS, frame, request, rolled_out, stored_policy, stored_tasks

AGENT = f"{AGENTS}:solver_and_judge"


@pytest.fixture
def shelf(memory_store, policy, other_policy):
    return (
        memory_store,
        stored_tasks(memory_store, 2),
        *(stored_policy(memory_store, p) for p in (policy, other_policy)),
    )


def asked(shelf, roles, execution=None, given=None, **config):
    """Rollouts by the first policy, with ``roles`` by the second."""
    _, tasks, own, other = shelf
    served = {name: {"policy": str(other.ref), **settings} for name, settings in roles.items()}
    made = request(tasks, own, {"agent": AGENT, "roles": served, **config}, execution)
    made.inputs["role_policies"] = [other] if given is None else given
    return made


def test_each_role_is_answered_by_its_own_policy_as_it_is_told_to_sample(shelf, policy, other_policy):
    store, _, own, other = shelf
    made = rolled_out(store, asked(shelf, {"judge": {"sampling": {"temperature": 0.5, "max_tokens": 5}}})).manifest
    steps = frame(store, made, "steps")
    by_role = {name: set(group["policy_id"]) for (name,), group in steps.group_by("trajectory")}
    assert by_role == {"judge": {other.key}, "solver-0": {own.key}, "solver-1": {own.key}}
    told = {name: set(group["temperature"]) for (name,), group in steps.group_by("trajectory")}
    assert told == {"judge": {0.5}, "solver-0": {1.0}, "solver-1": {1.0}}
    judges = steps.filter(trajectory="judge")
    assert all(len(ids) <= 5 for ids in judges["response_ids"].to_list())
    for rows, files in ((judges, other_policy), (steps.filter(trajectory="solver-0"), policy)):
        for n, (prompt, sampled) in enumerate(whole_sequences(rows)):
            expected = forward_logprobs(files.folder, np.array([*prompt, *sampled], np.int32))[-len(sampled) :]
            assert np.abs(np.array(rows["logprobs"][n].to_list()) - expected).max() < 1e-4
    assert made.inputs["role_policies"] == [other.ref]


def test_roles_without_a_policy_of_their_own_sample_what_they_would_without_any(shelf):
    store, tasks, own, _ = shelf
    with_roles = frame(store, rolled_out(store, asked(shelf, {"judge": {}})).manifest, "steps")
    without = frame(store, rolled_out(store, request(tasks, own, {"agent": AGENT})).manifest, "steps")
    first = [
        set(map(tuple, steps.filter(trajectory="solver-0")["prompt_ids"].to_list())) for steps in (with_roles, without)
    ]
    assert first[0] == first[1]
    assert set(without["policy_id"]) == {own.key}


def test_an_engine_of_its_own_kind_serves_a_role(shelf):
    store, _, _, other = shelf
    roles = {"solver-*": {"engine": {"type": "scripted", "n_tokens": 3}}}
    steps = frame(store, rolled_out(store, asked(shelf, roles)).manifest, "steps")
    solvers = steps.filter(steps["trajectory"].str.starts_with("solver-"))
    assert set(solvers["response_ids"].list.len()) == {3}
    assert set(solvers["policy_id"]) == {other.key}
    assert other.key not in set(steps.filter(trajectory="judge")["policy_id"])


def test_interrupted_work_is_answered_from_each_policy_s_own_journal(shelf):
    store = shelf[0]
    made = asked(shelf, {"judge": {}}, {"max_concurrency": 1, "shard_tasks": 2}, agent_config={"a": 1})

    def interrupt(shard, done, total):
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        rolled_out(store, made, progress=interrupt)
    steps = frame(store, rolled_out(store, made).manifest, "steps")
    assert len(steps) == 6
    assert (
        len(set(steps.filter(trajectory="judge")["policy_id"]) - set(steps.filter(trajectory="solver-0")["policy_id"]))
        == 1
    )


def test_a_whole_name_counts_before_patterns_and_a_long_pattern_before_a_short_one():
    served = {"*": 1, "solver-*": 2, "solver-1": 3, "a.c": 4}
    assert [served_by(role, served, 0) for role in ("judge", "solver-0", "solver-1", "abc")] == [1, 2, 3, 1]
    assert served_by("solver", {"solver-*": 2}, 0) == 0


def test_what_cannot_serve_is_refused_before_work(shelf):
    store, _, own, other = shelf
    with pytest.raises(ConfigError, match="is not among the inputs"):
        prepare(store, asked(shelf, {"judge": {}}, given=[]))
    with pytest.raises(ConfigError, match="answers for no role"):
        prepare(store, asked(shelf, {"judge": {}}, given=[other, own]))
    with pytest.raises(ConfigError, match=r"role_vllm.jury: there is no such role"):
        prepare(store, asked(shelf, {"judge": {}}, {"role_vllm": {"jury": {"workers": 1}}}))
    vllm = {"engine": {"type": "vllm"}}
    shared = {"vllm": {"workers": ["http://127.0.0.1:8000"]}}
    with pytest.raises(ConfigError, match="would serve two policies") as told:
        prepare(store, asked(shelf, {"judge": {}}, shared, **vllm))
    assert told.value.hint == "give execution.rollouts.role_vllm.judge.workers servers of their own"
    endpoint = {"type": "endpoint", "base_url": "https://host/v1", "model": "m"}
    with pytest.raises(ConfigError, match="a role has a policy of the store"):
        validated(RolloutsConfig, {"roles": {"judge": {"policy": "policy/x", "engine": endpoint}}}, "rollouts")
    with pytest.raises(ConfigError, match="no role is answered by a policy"):
        validated(RolloutsConfig, {"engine": endpoint, "roles": {"judge": {"policy": "policy/x"}}}, "rollouts")
    assert (
        validated(RolloutsExecution, {"role_vllm": {"judge": {"workers": 2}}}, "x").of_role("judge").vllm.workers == 2
    )
