"""The rollouts stage over vLLM servers: what its settings mean, what it records, and what survives their loss."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from schemas.artifacts import Manifest, Receipt
from schemas.canonical import seed_from
from schemas.config import validated
from schemas.errors import ConfigError, InputError, StageFailed
from stages.artifacts.commit import prepare
from stages.artifacts.layout import read_record, receipt_path
from stages.artifacts.store import open_store
from stages.rollouts.config import RolloutsConfig, RolloutsExecution
from stages.rollouts.engines import close_engines
from stages.rollouts.engines.base import Probe
from tests.stages.rollouts.stand_in import StandIn, answer_ids
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks

VLLM = {"type": "vllm"}
VOCABULARY, CONTEXT = 304, 256


@pytest.fixture
def servers():
    made = [StandIn(VOCABULARY, CONTEXT) for _ in range(2)]
    yield made
    close_engines()
    for server in made:
        server.fault = None
        server.close()


@pytest.fixture
def shelf(tmp_path, policy):
    """A store with six tasks and a policy that is uniform over its vocabulary: (store, tasks, policy)."""
    store = open_store(tmp_path / "store")
    uniform = [np.full(len(ids) - 1, -np.log(VOCABULARY), dtype=np.float32) for ids in policy.probe.ids]
    stored = stored_policy(store, replace(policy, probe=Probe(policy.probe.ids, uniform)))
    return store, stored_tasks(store, 6), stored


def attached(servers, **settings):
    quick = {"health_interval_s": 0.1, "backoff_s": 0.1, "max_failures": 2}
    return {"vllm": {"workers": [server.url for server in servers], **quick, **settings}}


def test_every_call_is_recorded_with_the_ids_logprobs_and_worker_that_the_server_gave(servers, shelf):
    store, tasks, stored = shelf
    manifest = rolled_out(store, request(tasks, stored, {"n": 3, "engine": VLLM}, attached(servers))).manifest
    steps = frame(store, manifest, "steps")
    assert len(steps) == 18
    for row in steps.iter_rows(named=True):
        assert row["response_ids"] == answer_ids(row["seed"], 8, VOCABULARY)
        assert row["logprobs"] == pytest.approx([-np.log(VOCABULARY)] * 8)
    assert set(steps["policy_id"]) == {stored.key}
    assert set(steps["logprob_mode"]) == {"raw"}
    assert set(steps["worker"]) <= {f"vllm:127.0.0.1:{server.port}" for server in servers}
    assert manifest.summary["vllm_versions"] == ["0.32.0"]


def test_the_number_of_workers_changes_no_sample_and_no_key(servers, shelf, tmp_path):
    store, tasks, stored = shelf
    one = request(tasks, stored, {"n": 2, "engine": VLLM}, attached(servers[:1]))
    two = request(tasks, stored, {"n": 2, "engine": VLLM}, attached(servers, max_in_flight=3))
    assert one.key == two.key
    assert one.key != request(tasks, stored, {"n": 2, "engine": VLLM | {"dtype": "bfloat16"}}).key
    assert one.key != request(tasks, stored, {"n": 2, "engine": VLLM | {"args": {"quantization": "fp8"}}}).key
    found = frame(store, rolled_out(store, one).manifest, "steps")
    other = open_store(tmp_path / "other")
    again = frame(other, rolled_out(other, replace_inputs(two, other, shelf)).manifest, "steps")
    assert found.select("episode_id", "response_ids").equals(again.select("episode_id", "response_ids"))


def test_answers_that_could_not_be_used_are_counted_and_kept_apart(servers, shelf):
    store, tasks, stored = shelf
    bad, _ = servers
    asked = request(tasks, stored, {"n": 2, "engine": VLLM}, attached(servers, max_failures=1000))
    bad.fault = "too few logprobs"

    manifest = rolled_out(store, asked).manifest
    errors = frame(store, manifest, "call_errors")
    assert len(frame(store, manifest, "steps")) == 12
    assert manifest.summary["n_retries"] == len(errors) > 0
    assert set(errors["status"]) == {"retried"}
    assert set(errors["kind"]) == {"UnusableAnswer"}
    assert errors["message"].str.starts_with(f"vllm:127.0.0.1:{bad.port}: ").all()
    assert set(errors["episode_id"]) <= set(frame(store, manifest, "episodes")["episode_id"])


def test_a_call_that_nobody_reads_along_is_not_streamed_and_what_was_asked_is_kept(servers, shelf):
    store, tasks, stored = shelf
    for server in servers:
        server.seconds = 3600
    config = {"engine": VLLM, "episode_time_limit_s": 3.0}
    manifest = rolled_out(store, request(tasks, stored, config, attached(servers) | {"shard_tasks": 6})).manifest
    errors = frame(store, manifest, "call_errors")
    assert errors.select("status", "policy_id").rows() == [("abandoned", stored.key)] * 6
    assert errors.select("response_ids", "logprobs").null_count().row(0) == (6, 6), "the server does not tell"
    bodies = [body for server in servers for body in server.asked]
    assert not any("stream" in body for body in bodies)
    assert 0 < len(bodies) == sum(body["prompt"] in errors["prompt_ids"].to_list() for body in bodies)


def test_with_all_workers_gone_what_is_finished_is_kept_and_the_rerun_resumes(servers, shelf, monkeypatch):
    store, tasks, stored = shelf
    monkeypatch.setattr("stages.rollouts.engines.vllm._FAULT_HOLDS_S", 0.0)
    asked = request(tasks, stored, {"n": 4, "engine": VLLM}, attached(servers) | {"shard_tasks": 2})

    def until_one_is_done(do, shards):
        do(shards[0])
        for server in servers:
            server.stop_listening()
        for shard in shards[1:]:
            do(shard)

    with pytest.raises(StageFailed, match="cannot be reached"):
        rolled_out(store, asked, map_shards=until_one_is_done)
    answered = sum(len(server.asked) for server in servers)
    assert answered == 8
    for server in servers:
        server.listen_again()
    manifest = rolled_out(store, asked).manifest
    assert len(frame(store, manifest, "episodes")) == 24
    assert sum(len(server.asked) for server in servers) == 24


def test_stragglers_are_left_and_which_they_were_is_recorded(servers, shelf):
    store, tasks, stored = shelf
    slow = {seed for n, seed in enumerate(seeds_of(shelf)) if n % 8 == 0}
    for server in servers:
        server.slow_seeds = slow
    config = {"n": 4, "engine": VLLM, "finish_when": {"share": 0.8, "per_group_min": 2}}
    asked = request(tasks, stored, config, attached(servers) | {"shard_tasks": 6})
    outcome = rolled_out(store, asked)
    episodes = frame(store, outcome.manifest, "episodes")
    assert 20 <= len(episodes) < 24
    assert outcome.manifest.summary["n_left"] == 24 - len(episodes)
    left = store_receipts(store, outcome.manifest)[0].summary["left"]
    made = set(episodes.select("task_id", "rollout_index").rows())
    assert made | {(task, index) for task, indices in left.items() for index in indices} == {
        (f"t{task:03d}", index) for task in range(6) for index in range(4)
    }
    assert all(count >= 2 for count in episodes.group_by("task_id").len()["len"])
    assert set(episodes["status"]) <= {"completed", "truncated"}


def test_a_group_that_lacks_its_minimum_is_waited_for(servers, shelf):
    store, tasks, stored = shelf
    for server in servers:
        server.seconds = 0.05
        server.slow_seeds, server.slow_s = set(seeds_of(shelf)[:3]), 1.0  # of the first task
    config = {"n": 4, "engine": VLLM, "finish_when": {"share": 0.5, "per_group_min": 3}}
    asked = request(tasks, stored, config, attached(servers) | {"shard_tasks": 6})
    episodes = frame(store, rolled_out(store, asked).manifest, "episodes")
    assert len(episodes.filter(task_id="t000")) >= 3


def test_a_whole_share_leaves_nobody(servers, shelf):
    store, tasks, stored = shelf
    config = {"n": 2, "engine": VLLM, "finish_when": {"share": 1.0, "per_group_min": 0}}
    manifest = rolled_out(store, request(tasks, stored, config, attached(servers))).manifest
    assert manifest.summary["n_episodes"] == 12
    assert manifest.summary["n_left"] == 0


def test_prompts_are_held_against_the_context_that_the_server_is_given(shelf):
    store, tasks, stored = shelf
    asked = request(
        tasks, stored, {"engine": VLLM | {"args": {"max_model_len": 16}}}, {"vllm": {"workers": ["http://127.0.0.1:9"]}}
    )
    with pytest.raises(InputError, match="context of 16 tokens"):
        prepare(store, asked)


def test_a_missing_environment_is_told_before_anything_is_written(shelf, monkeypatch, tmp_path):
    store, tasks, stored = shelf
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLMILL_VLLM_PYTHON", raising=False)
    asked = request(tasks, stored, {"engine": VLLM})
    with pytest.raises(ConfigError, match="make vllm"):
        prepare(store, asked)
    monkeypatch.setenv("ROLLMILL_VLLM_PYTHON", "/no/such/python")
    with pytest.raises(ConfigError, match="/no/such/python"):
        prepare(store, asked)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"engine": VLLM | {"workers": 2}}, "workers only changes how the work is done: set it in execution.rollouts"),
        ({"engine": VLLM | {"args": {"max_num_seqs": 8}}}, "it changes no sample"),
        ({"engine": VLLM | {"args": {"model": "x"}}}, "Rollmill sets it itself"),
        ({"engine": VLLM | {"dtype": "int3"}}, "dtype"),
        ({"n": 2, "finish_when": {"share": 0.9, "per_group_min": 3}}, "per_group_min is 3, and n only 2"),
        ({"finish_when": {"share": 0}}, "share"),
    ],
)
def test_wrong_settings_are_refused(config, told):
    with pytest.raises(ConfigError, match=told):
        validated(RolloutsConfig, config, "rollouts")


@pytest.mark.parametrize(
    ("execution", "told"),
    [
        ({"workers": 0}, "one worker at least"),
        ({"workers": []}, "one worker at least"),
        ({"workers": ["localhost:8000"]}, "no URL"),
        ({"workers": "many"}, "workers"),
        ({"args": {"quantization": "fp8"}}, "it may change samples: set it in rollouts.engine.args"),
        ({"args": {"port": 1}}, "Rollmill sets it itself"),
        ({"wokers": 1}, "workers"),
    ],
)
def test_wrong_execution_is_refused(execution, told):
    with pytest.raises(ConfigError, match=told):
        validated(RolloutsExecution, {"vllm": execution}, "execution")


def seeds_of(shelf):
    """Of the single calls of six tasks with four attempts each, as the stage derives them."""
    return [
        seed_from(seed_from(7, 0, 0, f"t{task:03d}", index), "default", 0) for task in range(6) for index in range(4)
    ]


def store_receipts(store, manifest):
    return [read_record(store.storage, receipt_path("rollouts", manifest.key, "00000"), Receipt)]


def replace_inputs(asked, store, shelf):
    """The same request on copies of its inputs in another store."""
    shutil.copytree(shelf[0].url, store.url, dirs_exist_ok=True, ignore=shutil.ignore_patterns(asked.key))
    given: dict[str, list[Manifest]] = {
        name: [store.manifest(manifest.ref) for manifest in manifests] for name, manifests in asked.inputs.items()
    }
    return replace(asked, inputs=given)
