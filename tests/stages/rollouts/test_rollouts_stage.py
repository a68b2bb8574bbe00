"""The rollouts stage end to end: what it records, that it repeats itself, and what it refuses."""

import dataclasses
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import polars as pl
import pytest

from schemas.artifacts import Receipt
from schemas.canonical import canonical_hash, seed_from
from schemas.config import validated
from schemas.errors import ConfigError, InputError, NotFoundError, StageFailed
from schemas.tables import EPISODES, STEPS
from stages.artifacts.commit import lookup, prepare, run_shard
from stages.artifacts.stage import Work
from stages.artifacts.store import open_store
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.config import Batch
from stages.rollouts.engines import close_engines
from stages.rollouts.selection import selected
from stages.rollouts.stage import STAGE
from tests.builders import given
from tests.stages.rollouts.policies import forward_logprobs
from tests.stages.rollouts.stored import AGENTS, frame, request, rolled_out, stored_policy, stored_tasks

SCRIPTED = {"type": "scripted", "n_tokens": 5}


@pytest.fixture
def shelf(memory_store, policy):
    """A store with three tasks and the tiny policy: (store, tasks, policy)."""
    return memory_store, stored_tasks(memory_store), stored_policy(memory_store, policy)


def samples(store, manifest):
    """What was sampled, by task and attempt: all that must repeat."""
    steps = frame(store, manifest, "steps").join(frame(store, manifest, "episodes"), on="episode_id")
    columns = ["task_id", "rollout_index", "trajectory", "step_index", "response_ids", "seed", "prompt_ids"]
    return steps.select(columns).sort(columns[:4]).rows()


def test_each_task_is_attempted_n_times_and_each_call_recorded(shelf, policy):
    store, tasks, stored = shelf
    manifest = rolled_out(store, request(tasks, stored, {"n": 4, "agent_config": {"system": "be brief"}})).manifest
    episodes, steps = frame(store, manifest, "episodes"), frame(store, manifest, "steps")
    assert len(episodes) == len(steps) == 12
    assert sorted(episodes.select("task_id", "rollout_index").rows()) == [
        (f"t{task:03d}", index) for task in range(3) for index in range(4)
    ]
    assert set(episodes["agent"]) == {"single_turn"}
    assert set(episodes["status"]) <= {"completed", "truncated"}
    assert (episodes["status"] == "truncated").sum() == (steps["finish_reason"] == "length").sum()
    assert set(steps["policy_id"]) == {stored.key}
    assert set(steps["trajectory"]) == {"default"}
    assert steps["response"].null_count() == 0
    assert json.loads(steps["messages"][0])[0] == {"content": "be brief", "role": "system"}
    assert episodes["prompt_tokens"].sum() == steps["prompt_ids"].list.len().sum() == manifest.summary["prompt_tokens"]
    assert episodes["response_tokens"].sum() == steps["response_ids"].list.len().sum()
    for row in steps.head(4).iter_rows(named=True):
        ids = np.array(row["prompt_ids"] + row["response_ids"], dtype=np.int32)
        wanted = forward_logprobs(policy.folder, ids)[-len(row["response_ids"]) :]
        np.testing.assert_allclose(row["logprobs"], wanted, atol=1e-5)


def test_ids_and_seeds_derive_from_the_work_as_the_design_says(shelf):
    store, tasks, stored = shelf
    manifest = rolled_out(store, request(tasks, stored, {"n": 2}, seed=5, draw=1)).manifest
    episode = frame(store, manifest, "episodes").filter(task_id="t001", rollout_index=1).row(0, named=True)
    assert episode["episode_id"] == canonical_hash([manifest.key, "t001", 1])[:32]
    assert episode["seed"] == seed_from(5, 1, 0, "t001", 1)
    step = frame(store, manifest, "steps").filter(episode_id=episode["episode_id"]).row(0, named=True)
    assert step["seed"] == seed_from(episode["seed"], "default", 0)


def test_rows_are_in_the_declared_schema_and_sorted_in_each_file(shelf):
    store, tasks, stored = shelf
    asked = request(tasks, stored, {"n": 3, "engine": SCRIPTED, "agent": f"{AGENTS}:solver_and_judge"})
    plan = prepare(store, asked)
    for spec in (EPISODES, STEPS):
        table = _one_shard(store, asked, plan)[spec.name]
        assert table.schema.equals(spec.schema, check_metadata=True)
        keys = table.select(list(spec.id_columns)).to_pylist()
        assert keys == sorted(keys, key=lambda row: tuple(row.values()))
        assert len(keys) == {"episodes": 6, "steps": 18}[spec.name]


def _one_shard(store, asked, plan):
    work = Work(key=asked.key, seed=asked.seed, draw=asked.draw, scratch=Path("unused"))
    return STAGE.work(plan.shards[0], store.inputs(asked.inputs), asked.config, asked.execution, work).tables


def test_the_same_work_gives_the_same_samples_however_it_is_cut(policy):
    found = []
    for execution in ({"shard_tasks": 1}, {"shard_tasks": 3, "max_batch": 2}, {"shard_tasks": 2, "max_concurrency": 1}):
        other = open_store(f"memory://{token_hex(8)}")
        asked = request(stored_tasks(other), stored_policy(other, policy), {"n": 3}, execution)
        manifest = rolled_out(other, asked).manifest
        found.append((manifest.key, samples(other, manifest)))
    assert found[0] == found[1] == found[2]


def test_interrupted_work_goes_on_with_the_same_samples(shelf, policy):
    store, tasks, stored = shelf
    asked = request(tasks, stored, {"n": 2}, {"shard_tasks": 1})
    plan = prepare(store, asked)
    run_shard(store, asked, plan, plan.shards[1].id)
    close_engines()
    resumed = rolled_out(store, asked).manifest
    other = open_store(f"memory://{token_hex(8)}")
    whole = rolled_out(other, request(stored_tasks(other), stored_policy(other, policy), {"n": 2})).manifest
    assert samples(store, resumed) == samples(other, whole)


def test_what_changes_the_samples_changes_the_key_and_nothing_else_does(shelf):
    _, tasks, stored = shelf
    base = request(tasks, stored).key
    for execution in ({"shard_tasks": 9}, {"max_batch": 3}, {"max_concurrency": 2}, {"device": "cpu"}, {"threads": 2},
                      {"probe_tolerance": 0.5}, {"agents": "processes"}):  # fmt: skip
        assert request(tasks, stored, {}, execution).key == base
    for config in ({"n": 2}, {"sampling": {"max_tokens": 9}}, {"sampling": {"temperature": 0.5, "max_tokens": 8}},
                   {"batch": {"size": 1}}, {"max_turns": 3}, {"episode_time_limit_s": 9.0}, {"is_validation": True},
                   {"engine": {"type": "transformers", "dtype": "bfloat16"}}, {"agent_config": {"system": "x"}},
                   {"agent": f"{AGENTS}:hangs"}):  # fmt: skip
        assert request(tasks, stored, config).key != base
    assert request(tasks, stored, seed=8).key != base
    assert request(tasks, stored, draw=1).key != base


def test_another_draw_or_batch_gives_other_samples(shelf):
    store, tasks, stored = shelf
    one, two = (samples(store, rolled_out(store, request(tasks, stored, draw=draw)).manifest) for draw in (0, 1))
    assert [row[4] for row in one] != [row[4] for row in two]


def test_an_agents_changed_code_is_other_work(shelf, tmp_path):
    _, tasks, stored = shelf
    file = tmp_path / "mine.py"
    file.write_text("async def solve(task, config):\n    return None\n")
    before = request(tasks, stored, {"agent": f"{file}:solve"}).key
    file.write_text("async def solve(task, config):\n    return 'x'\n")
    assert request(tasks, stored, {"agent": f"{file}:solve"}).key != before


def test_multi_turn_agents_and_roles_are_recorded_by_trajectory(shelf):
    store, tasks, stored = shelf
    config: dict[str, Any] = {"engine": SCRIPTED, "agent": f"{AGENTS}:three_turns"}
    manifest = rolled_out(store, request(tasks, stored, config)).manifest
    steps = frame(store, manifest, "steps").sort("episode_id", "step_index")
    assert set(steps["trajectory"]) == {"solver"}
    for _, episode in steps.group_by("episode_id", maintain_order=True):
        assert episode["step_index"].to_list() == [0, 1, 2]
        ends = episode["prefix_length"] + episode["prompt_ids"].list.len() + episode["response_ids"].list.len()
        assert episode["prefix_length"].to_list() == [0, *ends.to_list()[:2]]
        assert [len(json.loads(messages)) for messages in episode["messages"]] == [1, 1, 1]
    assert set(frame(store, manifest, "episodes")["artifacts"]) == {'{"turns":3}'}

    config = {"engine": SCRIPTED, "agent": f"{AGENTS}:solver_and_judge", "is_validation": True,
              "agent_config": {"depth": 2}}  # fmt: skip
    manifest = rolled_out(store, request(tasks, stored, config)).manifest
    steps, episodes = frame(store, manifest, "steps"), frame(store, manifest, "episodes")
    assert set(steps["trajectory"]) == {"solver-0", "solver-1", "judge"}
    assert len(steps) == 9
    told = json.loads(episodes["artifacts"][0])
    assert told["trajectories"] == {"judge": {"reward": 1.0, "signals": {"sure": 0.5}}}
    assert (told["is_validation"], told["metadata"], told["seed"]) == (True, {"depth": 2}, episodes["seed"][0])


def test_a_plain_function_asks_from_its_own_thread(shelf):
    store, tasks, stored = shelf
    config = {"engine": SCRIPTED, "agent": f"{AGENTS}:sync_two_turns", "n": 5}
    manifest = rolled_out(store, request(tasks, stored, config)).manifest
    steps, episodes = frame(store, manifest, "steps"), frame(store, manifest, "episodes")
    assert len(steps) == 30
    first = steps.filter(step_index=0).join(episodes, on="episode_id")
    assert [json.loads(text)["answer"] for text in first["artifacts"]] == first["response"].to_list()


@pytest.mark.parametrize(
    ("agent", "status", "kind", "said", "n_steps"),
    [
        ("raises_in_second_turn", "error", "ValueError", "no good", 1),
        ("hangs", "timeout", "TimeoutError", "limit of 1 s", 1),
        ("hangs_in_a_thread", "timeout", "TimeoutError", "limit of 1 s", 1),
        ("hangs_and_ignores_its_end", "timeout", "TimeoutError", "limit of 1 s", 1),
        ("asks_for_ever", "max_turns", None, None, 2),
        ("swallows_the_limit", "max_turns", None, None, 2),
        ("returns_nonsense", "error", "TypeError", "the agent returned a int", 1),
        ("returns_what_has_no_json", "error", "TypeError", "no canonical JSON form", 1),
        ("exits", "error", "AgentExit", r"SystemExit\(3\)", 0),
        ("exits_async", "error", "AgentExit", r"SystemExit\(3\)", 0),
        ("cancels_itself", "error", "AgentExit", "cancelled itself", 0),
        ("too_long", "error", "ContextExceeded", "context of 256", 0),
        ("sends_nonsense", "error", "TypeError", "no canonical JSON form", 0),
    ],
)
def test_an_agents_fault_is_its_episodes_status_and_its_steps_are_kept(shelf, agent, status, kind, said, n_steps):
    store, tasks, stored = shelf
    config = {
        "engine": SCRIPTED,
        "agent": f"{AGENTS}:{agent}",
        "max_turns": 2,
        "episode_time_limit_s": 1 if status == "timeout" else 60,
    }
    execution = {"shard_tasks": 3}
    manifest = rolled_out(store, request(tasks, stored, config, execution)).manifest
    episodes = frame(store, manifest, "episodes")
    assert set(episodes["status"]) == {status}
    assert set(episodes["error_kind"]) == {kind}
    assert set(episodes["n_steps"]) == {n_steps}
    assert len(frame(store, manifest, "steps")) == 3 * n_steps
    if said is None:
        assert episodes["error"].null_count() == 3
    else:
        assert episodes["error"].str.contains(said).all()
        assert (episodes["error"].str.len_chars() <= 2000).all()
    assert manifest.summary["status"] == {status: 3}


def test_a_failed_call_is_no_step_and_has_a_row_of_its_own(shelf):
    store, tasks, stored = shelf
    config = {"engine": SCRIPTED, "agent": f"{AGENTS}:goes_on_after_a_refusal"}
    manifest = rolled_out(store, request(tasks, stored, config)).manifest
    episodes, steps = frame(store, manifest, "episodes"), frame(store, manifest, "steps")
    errors = frame(store, manifest, "call_errors")
    assert set(episodes["status"]) <= {"completed", "truncated"}
    assert steps.select("trajectory", "step_index").rows() == [("default", 0)] * 3
    assert (
        errors.select("trajectory", "error_index", "status", "kind").rows()
        == [
            ("default", 0, "refused", "ContextExceeded"),
            ("default", 1, "refused", "TypeError"),
        ]
        * 3
    )
    assert errors["message"].str.contains("context of 256").sum() == 3
    assert set(errors["episode_id"]) == set(episodes["episode_id"])


def test_a_request_that_is_no_call_is_recorded_as_an_error(shelf):
    store, tasks, stored = shelf
    config = {"engine": SCRIPTED, "agent": f"{AGENTS}:sends_garbage_over_http"}
    manifest = rolled_out(store, request(tasks, stored, config)).manifest
    assert len(frame(store, manifest, "steps")) == 3
    errors = frame(store, manifest, "call_errors")
    assert errors["kind"].to_list() == ["invalid_json", "model_not_found"] * 3


def test_a_call_that_its_agent_abandons_is_told_apart(shelf):
    store, tasks, stored = shelf
    manifest = rolled_out(store, request(tasks, stored, {"agent": f"{AGENTS}:abandons_a_call"})).manifest
    assert set(frame(store, manifest, "steps")["trajectory"]) == {"default"}
    errors = frame(store, manifest, "call_errors")
    assert errors.select("trajectory", "status", "kind").rows() == [("slow", "abandoned", "CancelledError")] * 3


def test_secrets_of_this_machine_are_not_stored(shelf, monkeypatch):
    store, tasks, stored = shelf
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "s3cr3t-of-this-machine")
    for agent in ("tells_a_secret", "raises_a_secret"):
        manifest = rolled_out(
            store, request(tasks, stored, {"engine": SCRIPTED, "agent": f"{AGENTS}:{agent}"})
        ).manifest
        told = str(frame(store, manifest, "episodes").rows())
        assert "s3cr3t" not in told
        assert "key is ***" in told


def test_a_trajectory_that_an_agent_names_gets_its_calls(shelf):
    store, tasks, stored = shelf
    config = {"engine": SCRIPTED, "agent": f"{AGENTS}:names_its_trajectory"}
    manifest = rolled_out(store, request(tasks, stored, config)).manifest
    assert frame(store, manifest, "steps").select("trajectory", "step_index").rows() == [("walker", 0)] * 3
    assert set(frame(store, manifest, "episodes")["artifacts"]) == {
        '{"trajectories":{"walker":{"reward":1.0,"signals":{}}}}'
    }


def test_an_agent_is_ended_at_its_time_limit(shelf, tmp_path):
    store, tasks, stored = shelf
    config = {
        "engine": SCRIPTED,
        "agent": f"{AGENTS}:notes_its_end",
        "agent_config": {"folder": str(tmp_path)},
        "episode_time_limit_s": 0.1,
        "n": 2,
    }
    manifest = rolled_out(store, request(tasks, stored, config, {"max_concurrency": 1, "shard_tasks": 9})).manifest
    episodes = frame(store, manifest, "episodes")
    assert episodes["status"].to_list() == ["timeout"] * 6
    assert all(seconds >= 0.1 for seconds in episodes["duration_s"]), (
        "each has the whole time, however many go before it"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t000", "t001", "t002"]


def test_one_agents_fault_does_not_touch_its_siblings(shelf):
    store, tasks, stored = shelf
    config = {"agent": f"{AGENTS}:fails_sometimes", "n": 2}
    failing = rolled_out(store, request(tasks, stored, config)).manifest
    by_task = dict(frame(store, failing, "episodes").select("task_id", "status").rows())
    assert by_task["t001"] == "error"
    assert by_task["t000"] in ("completed", "truncated")
    alone = rolled_out(store, request(tasks, stored, {"n": 2})).manifest
    assert samples(store, failing) == samples(store, alone)


def test_an_engine_that_fails_ends_the_stage_and_records_no_episode(shelf):
    store, tasks, stored = shelf
    asked = request(tasks, stored, {"engine": {"type": "scripted", "replies": [[]]}})
    with pytest.raises(StageFailed, match="0 logprobs for 0 sampled"):
        rolled_out(store, asked)
    assert lookup(store, asked) is None


def test_a_policy_that_does_not_match_its_probe_serves_nothing(memory_store, policy, other_policy):
    wrong = dataclasses.replace(policy, probe=other_policy.probe)
    asked = request(stored_tasks(memory_store), stored_policy(memory_store, wrong))
    with pytest.raises(StageFailed, match="does not reproduce the probe"):
        rolled_out(memory_store, asked)


def test_progress_counts_episodes_and_the_summary_adds_up(shelf):
    store, tasks, stored = shelf
    seen: list[tuple[str, int, int]] = []
    outcome = rolled_out(store, request(tasks, stored, {"n": 3}), progress=lambda *told: seen.append(told))
    by_shard = {shard: (done, total) for shard, done, total in seen}
    assert sorted(by_shard.values()) == [(3, 3), (6, 6)]
    summary = outcome.manifest.summary
    assert (summary["n_tasks"], summary["n_episodes"], summary["n_steps"]) == (3, 9, 9)
    assert sum(summary["status"].values()) == 9
    assert summary["tokens_per_s"] == pytest.approx(summary["response_tokens"] / summary["sampling_s"], rel=0.01)


def test_a_shard_holds_about_512_episodes_where_nobody_says_otherwise(memory_store, policy):
    tasks, stored = stored_tasks(memory_store, 70), stored_policy(memory_store, policy)
    for n, sizes in ((1, [70]), (16, [32, 32, 6]), (600, [1] * 70)):
        plan = prepare(memory_store, request(tasks, stored, {"n": n}, {"shard_tasks": None}))
        assert [len(shard.spec["task_ids"]) for shard in plan.shards] == sizes


def test_tokens_per_second_count_the_time_of_shards_side_by_side_once():
    began = datetime(2026, 12, 1, tzinfo=UTC)

    def receipt(shard: str, after_s: float, sampling_s: float) -> Receipt:
        summary = {"sampling_s": sampling_s, "response_tokens": 100, "status": {"completed": 1}, "tokens_per_s": None}
        return Receipt(
            key="0" * 64,
            shard=shard,
            files=[],
            summary=summary,
            started_at=began + timedelta(seconds=after_s),
            duration_s=10,
            host="here",
            nonce=shard,
        )

    summary = STAGE.summarise([receipt("00002", 20, 5), receipt("00000", 0, 10), receipt("00001", 5, 10)])
    assert summary["sampling_s"] == 25
    assert summary["tokens_per_s"] == pytest.approx(300 / (15 + 5))


def test_batches_of_an_epoch_hold_every_task_once_and_epochs_differ():
    ids = [f"t{n}" for n in range(23)]
    epochs = [
        [selected(ids, Batch(size=5, index=4 * epoch + place), seed=3) for place in range(4)] for epoch in range(2)
    ]
    for batches in epochs:
        together = [task_id for batch in batches for task_id in batch]
        assert len(set(together)) == 20
        assert all(batch == sorted(batch) for batch in batches)
    assert epochs[0] != epochs[1]
    assert selected(ids[::-1], Batch(size=5, index=2), seed=3) == epochs[0][2]
    assert selected(ids, Batch(size=5, index=2), seed=4) != epochs[0][2]
    assert selected(ids, None, seed=3) == sorted(ids)


def test_a_batch_is_attempted_and_no_other_task(shelf):
    store, tasks, stored = shelf
    manifest = rolled_out(store, request(tasks, stored, {"batch": {"size": 2, "index": 5}, "n": 2})).manifest
    wanted = selected(["t000", "t001", "t002"], Batch(size=2, index=5), seed=7)
    assert sorted(set(frame(store, manifest, "episodes")["task_id"])) == wanted
    with pytest.raises(InputError, match="4 tasks is asked for, and there are 3"):
        rolled_out(store, request(tasks, stored, {"batch": {"size": 4}}))


def test_the_agent_of_the_task_is_taken_where_the_config_names_none(memory_store, policy):
    stored = stored_policy(memory_store, policy)
    tasks = stored_tasks(memory_store, agent="single_turn")
    manifest = rolled_out(memory_store, request(tasks, stored)).manifest
    assert set(frame(memory_store, manifest, "episodes")["agent"]) == {"single_turn"}
    with pytest.raises(ConfigError, match="code is only run where a config names it"):
        rolled_out(memory_store, request(stored_tasks(memory_store, agent="os:system"), stored))
    with pytest.raises(ConfigError, match="did you mean 'single_turn'"):
        rolled_out(memory_store, request(stored_tasks(memory_store, agent="singleturn"), stored))


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"agent": "single_trun"}, ConfigError, "did you mean 'single_turn'"),
        ({"agent": "no/such.py:f"}, NotFoundError, "no file"),
        ({"agent": f"{AGENTS}:three_turn"}, NotFoundError, "did you mean 'three_turns'"),
        ({"agent": f"{AGENTS}:NOT_A_FUNCTION"}, InputError, "is a int"),
        ({"agent": f"{AGENTS}:takes_one"}, InputError, "two arguments"),
        ({"agent_config": {"sytem": "x"}}, ConfigError, "did you mean 'system'"),
        ({"n": 2, "sampling": {"temperature": 0}}, ConfigError, "all be the same"),
        ({"sampling": {"stop": ["two words"]}}, InputError, "only one can be a stop"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_written(shelf, config, error, said):
    store, tasks, stored = shelf
    with pytest.raises(error, match=said):
        rolled_out(store, request(tasks, stored, config))


def test_unknown_engines_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown engine 'transformer': did you mean 'transformers'"):
        validated(STAGE.Config, {"engine": {"type": "transformer"}}, "test")
    with pytest.raises(ConfigError, match="did you mean 'dtype'"):
        validated(STAGE.Config, {"engine": {"type": "transformers", "dtpye": "float32"}}, "test")


def test_a_stop_text_ends_answers(shelf, policy):
    store, tasks, stored = shelf
    config = {"sampling": {"stop": ["4"], "max_tokens": 60}, "n": 40}
    steps = frame(store, rolled_out(store, request(tasks, stored, config)).manifest, "steps")
    stop = chat_template_in(policy.folder).token_id("4")
    stopped = steps.filter(pl.col("response_ids").list.last() == stop)
    assert len(stopped) > 1
    assert set(stopped["finish_reason"]) == {"stop"}
    earlier = steps.select(pl.col("response_ids").list.slice(0, pl.col("response_ids").list.len() - 1))
    assert stop not in set(earlier["response_ids"].explode().to_list())


def test_a_task_that_is_too_long_for_the_context_is_named(memory_store, policy):
    stored = stored_policy(memory_store, policy)
    rows = [{"task_id": name, "instruction": text, "answer": None, "metadata": None, "benchmark": None, "split": None,
             "grader": None, "agent": None} for name, text in (("short", "1 + 1"), ("long", "0" * 300))]  # fmt: skip
    tasks = given(memory_store, "tasks", {"tasks": rows})
    with pytest.raises(InputError, match=r"context of 256 tokens has no room .* task long \(\d+\)"):
        rolled_out(memory_store, request(tasks, stored))


@pytest.mark.parametrize(
    ("leave_out", "said"),
    [
        (("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
        (("chat_template.jinja",), "no chat template"),
        (("config.json",), "no config.json"),
    ],
)
def test_a_policy_that_is_not_whole_is_refused(memory_store, policy, leave_out, said):
    stored = stored_policy(memory_store, policy, leave_out=leave_out)
    with pytest.raises(InputError, match=said):
        rolled_out(memory_store, request(stored_tasks(memory_store), stored))


def test_a_policy_without_a_probe_is_refused(memory_store, policy):
    files = {path.name: path.read_bytes() for path in policy.folder.iterdir()}
    stored = given(memory_store, "policy", {"probe": []}, parts={"checkpoint": files})
    with pytest.raises(InputError, match="no probe"):
        rolled_out(memory_store, request(stored_tasks(memory_store), stored))


def test_importing_the_stages_settings_needs_no_heavy_library():
    script = (
        "import sys, rollmill, stages.rollouts.stage, stages.tasks.stage\n"
        "heavy = {'torch', 'transformers', 'polars', 'prefect', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_setting_says_what_it_is():
    for model in (STAGE.Config, STAGE.Execution):
        assert all(field.description for field in model.model_fields.values())
