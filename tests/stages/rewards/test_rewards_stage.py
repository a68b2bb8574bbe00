"""The rewards stage on stored rollouts: rows, summary, key, and what it refuses before writing."""

import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError, InputError, NotFoundError
from schemas.tables import TABLES
from stages.artifacts.store import Store
from stages.rewards.stage import STAGE, RewardsConfig, RewardsExecution
from tests.builders import episode_rows, given, step_rows, task_rows
from tests.stages.rewards.helpers import by_episode, grade, own, request, rollouts_of, rows

ANSWERS = {"t000-0": "0", "t000-1": "1", "t001-0": "it is 2", "t001-1": None, "t002-0": "4", "t002-1": "four"}


def test_one_row_a_trajectory_with_the_reason(store: Store) -> None:
    manifest, frame = grade(store, rollouts_of(store, ANSWERS, shards=2), grader="numeric")
    assert by_episode(frame, "reward") == dict(zip(ANSWERS, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0], strict=True))
    assert by_episode(frame, "verdict") == dict(
        zip(ANSWERS, ["correct", "wrong_answer", "correct", "no_answer", "correct", "no_answer"], strict=True)
    )
    assert set(frame["grader"]) == {"numeric"}
    assert set(frame["grader_version"]) == {"1"}
    assert manifest.summary == {
        "n": 6,
        "n_ok": 6,
        "n_timeout": 0,
        "n_error": 0,
        "n_infra": 0,
        "n_judged": 6,
        "n_correct": 3,
        "mean_reward": 0.5,
        "pass_rate": 0.5,
        "verdicts": {"correct": 3, "no_answer": 2, "wrong_answer": 1},
    }


def test_a_shard_stored_in_several_files_is_graded_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.artifacts.parquet.FILE_CELL_BYTES", 1)
    tasks = given(store, "tasks", {"tasks": task_rows(600)})
    episodes = episode_rows([f"t{index:03d}" for index in range(600)], 1)
    shard = {"episodes": episodes, "steps": step_rows([row["episode_id"] for row in episodes])}
    rollouts = given(store, "rollouts", shard, inputs={"tasks": [tasks]})
    assert len(rollouts.table_files("episodes")) == 2
    manifest, _ = grade(store, (tasks, rollouts), {"shard_episodes": 1}, grader="exact")
    assert manifest.summary["n"] == 600


def test_a_second_grader_forks_from_the_same_rollouts(store: Store) -> None:
    inputs = rollouts_of(store, ANSWERS)
    numeric, _ = grade(store, inputs, grader="numeric")
    exact, frame = grade(store, inputs, grader="exact")
    assert exact.key != numeric.key
    assert exact.inputs == numeric.inputs
    assert by_episode(frame, "reward")["t001-0"] == 0.0


def test_all_that_a_grader_gives_is_stored(store: Store) -> None:
    manifest, frame = grade(
        store, rollouts_of(store, {"t002-0": "four"}), grader=own("thorough"), params={"bonus": 0.5}
    )
    assert frame.select("reward", "is_correct", "verdict", "explanation").row(0) == (
        1.5,
        True,
        "correct",
        "default of 2",
    )
    signals = rows(store, manifest, "signals")
    assert signals.filter(name="length").row(0) == ("t002-0", "default", "length", 4.0)
    assert rows(store, manifest, "step_rewards").rows() == [("t002-0", "default", 0, 0.5)]
    for table in STAGE.tables:
        assert manifest.schema_versions[table] == TABLES[table].version


@pytest.mark.parametrize(
    ("grader", "reward", "is_correct", "verdict"),
    [
        ("even", 0.25, None, None),
        ("stated", 1.0, True, "correct"),
        ("patient", 0.75, False, "wrong_answer"),
    ],
)
def test_numbers_bools_and_pairs_are_rewards(
    store: Store, grader: str, reward: float, is_correct: bool | None, verdict: str | None
) -> None:
    _, frame = grade(store, rollouts_of(store, {"t002-0": "4"}), grader=own(grader))
    assert frame.select("reward", "is_correct", "verdict").row(0) == (reward, is_correct, verdict)


def test_each_trajectory_of_an_episode_is_graded(store: Store) -> None:
    tasks = given(store, "tasks", {"tasks": task_rows(3)})
    steps = [
        row
        for name, response in (("solver", "4"), ("critic", "5"), ("judge", "6"))
        for row in step_rows(["t002-0"], trajectory=name, response=response)
    ]
    rollouts = given(
        store, "rollouts", {"episodes": episode_rows(["t002"], 1), "steps": steps}, inputs={"tasks": [tasks]}
    )
    _, frame = grade(store, (tasks, rollouts), grader="numeric")
    assert dict(frame.select("trajectory", "reward").iter_rows()) == {"solver": 1.0, "critic": 0.0, "judge": 0.0}
    _, frame = grade(store, (tasks, rollouts), grader=own("by_role"))
    assert dict(frame.select("trajectory", "reward").iter_rows()) == {"solver": 1.0, "critic": 0.5, "judge": None}
    assert "no reward for the trajectory 'judge'" in frame.filter(trajectory="judge")["explanation"][0]
    _, frame = grade(store, (tasks, rollouts), grader=own("even"))
    assert set(frame["reward"]) == {0.25}


def test_steps_reach_the_grader_in_order_with_tokens_if_asked(store: Store) -> None:
    tasks = given(store, "tasks", {"tasks": task_rows(3)})
    steps = [
        row | {"step_index": index}
        for index, ids in ((1, [5, 6, 2]), (0, [5, 2]))
        for row in step_rows(["t002-0"], response=str(index), response_ids=ids)
    ]
    rollouts = given(
        store, "rollouts", {"episodes": episode_rows(["t002"], 1), "steps": steps}, inputs={"tasks": [tasks]}
    )
    _, frame = grade(store, (tasks, rollouts), grader=own("counts_tokens"), tokens=True)
    assert frame["reward"].to_list() == [3.0]
    _, frame = grade(store, (tasks, rollouts), grader=own("counts_tokens"))
    assert frame["status"].to_list() == ["error"]


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_an_episode_that_broke_before_the_model_spoke_has_no_reward(store: Store, status: str) -> None:
    tasks = given(store, "tasks", {"tasks": task_rows(3)})
    broken = episode_rows(["t001"], 1, status=status, error_kind="EngineError", n_steps=0)
    shard = {"episodes": broken + episode_rows(["t002"], 2), "steps": step_rows(["t002-0", "t002-1"])}
    rollouts = given(store, "rollouts", shard, inputs={"tasks": [tasks]})
    manifest, frame = grade(store, (tasks, rollouts), {"max_failed_share": 0}, grader="numeric")
    assert frame.filter(episode_id="t001-0").select("trajectory", "status", "reward", "verdict").row(0) == (
        "default",
        "infra",
        None,
        None,
    )
    assert (manifest.summary["n_infra"], manifest.summary["mean_reward"], manifest.summary["pass_rate"]) == (1, 1, 1)


def test_an_episode_that_failed_after_it_spoke_has_no_reward_either(store: Store) -> None:
    _, frame = grade(store, rollouts_of(store, {"t002-0": "4"}, status="error", error_kind="E"), grader="numeric")
    assert frame.select("status", "reward").row(0) == ("infra", None)


def test_a_timed_out_episode_is_graded_on_what_it_said(store: Store) -> None:
    inputs = rollouts_of(store, {"t002-0": "4", "t002-1": "we add 2"}, status="timeout")
    _, frame = grade(store, inputs, grader="numeric")
    assert by_episode(frame, "verdict") == {"t002-0": "correct", "t002-1": "truncated"}


def test_without_a_grader_each_task_names_its_own(store: Store) -> None:
    wanted = [row | {"grader": name} for row, name in zip(task_rows(2), ["exact", "numeric"], strict=True)]
    tasks = given(store, "tasks", {"tasks": wanted})
    shard = {"episodes": episode_rows(["t000", "t001"], 1), "steps": step_rows(["t000-0", "t001-0"], response="is 2")}
    rollouts = given(store, "rollouts", shard, inputs={"tasks": [tasks]})
    manifest, frame = grade(store, (tasks, rollouts))
    assert by_episode(frame, "grader") == {"t000-0": "exact", "t001-0": "numeric"}
    assert by_episode(frame, "reward") == {"t000-0": 0.0, "t001-0": 1.0}
    assert manifest.config["grader_version"] == "agent=1,exact=1,math=1,numeric=1"


def test_the_key_knows_the_graders_source_and_params_but_not_the_workers(store: Store, tmp_path: Path) -> None:
    inputs = rollouts_of(store, {"t002-0": "4"})
    source = tmp_path / "own.py"
    source.write_text("def grade(task, episode, *, scale=1): return scale")
    name = f"{source}:grade"
    first = request(*inputs, grader=name).key
    assert request(*inputs, {"workers": 7, "chunk_size": 1}, grader=name).key == first
    assert request(*inputs, grader=name, params={"scale": 2}).key != first
    assert request(*inputs, grader=name, timeout_s=11).key != first
    source.write_text("def grade(task, episode, *, scale=2): return scale")
    assert request(*inputs, grader=name).key != first
    assert request(*inputs, grader="numeric").key == request(*inputs, grader="numeric", params={"abs_tol": 1e-6}).key


def test_a_source_that_changes_after_its_version_was_taken_is_refused(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text("def grade(task, episode): return 1")
    inputs = rollouts_of(store, {"t002-0": "4"})
    asked = request(*inputs, grader=f"{source}:grade")
    source.write_text("def grade(task, episode): return 2")
    with pytest.raises(ConfigError, match="no longer the version"):
        STAGE.check(store.inputs(asked.inputs), asked.config, asked.execution)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"grader": "numerik"}, NotFoundError, "unknown grader 'numerik': did you mean 'numeric'"),
        ({"grader": "nowhere.py:grade"}, NotFoundError, "there is no file"),
        ({"grader": "numeric", "params": {"abs_tolerance": 1}}, ConfigError, "did you mean 'abs_tol'"),
        ({"grader": "numeric", "params": {"abs_tol": -1}}, ConfigError, "abs_tol"),
    ],
)
def test_a_wrong_grader_or_param_is_refused(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        STAGE.resolve(RewardsConfig(**config), RewardsExecution())


@pytest.mark.parametrize("config", [{"timeout_s": 0}, {"memory_mb": 1}, {"params": {"abs_tol": 1}}, {"graders": "x"}])
def test_settings_out_of_bounds_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        RewardsConfig(**config)


def refused(store: Store, tasks: list[dict[str, Any]], task_ids: list[str], **config: Any) -> str:
    given_tasks = given(store, "tasks", {"tasks": tasks})
    episodes = episode_rows(task_ids, 1)
    shard = {"episodes": episodes, "steps": step_rows([row["episode_id"] for row in episodes])}
    rollouts = given(store, "rollouts", shard if episodes else {}, inputs={"tasks": [given_tasks]})
    asked = request(given_tasks, rollouts, **config)
    with pytest.raises((InputError, NotFoundError)) as caught:
        STAGE.check(store.inputs(asked.inputs), asked.config, asked.execution)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_inputs_that_cannot_be_graded_are_refused(store: Store) -> None:
    assert "task 't000' names no grader" in refused(store, task_rows(2), ["t000"])
    assert "did you mean 'exact'" in refused(store, task_rows(2, grader="exactly"), ["t000"])
    assert "may only name a built-in" in refused(store, task_rows(2, grader="os:system"), ["t000"])
    assert "2 tasks have none, the first is 't000'" in refused(
        store, task_rows(2, answer=None), ["t000", "t001"], grader="exact"
    )
    assert "the first is 't001'" in refused(store, task_rows(1), ["t000", "t001"], grader="exact")


def test_importing_the_stage_loads_nothing_heavy() -> None:
    import subprocess

    code = "import stages.rewards.stage, stages.rewards.sdk, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"math_verify", "sympy", "polars", "torch", "prefect"} & set(loaded)
