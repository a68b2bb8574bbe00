"""Whatever one grading does to its process, the others are graded, and the guilty one gets a status, never a reward."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import InputError, StageFailed
from stages.artifacts.commit import materialise
from stages.artifacts.store import Store, open_store
from tests.stages.rewards.helpers import by_episode, grade, own, request, rollouts_of, rows

EPISODES = {f"t{task:03d}-{index}": str(2 * task) for task in range(3) for index in range(3)}
GUILTY = "t001-1"


@pytest.mark.parametrize(
    ("grader", "status", "message"),
    [
        ("loops", "timeout", "longer than 1 s"),
        ("loops_and_swallows", "timeout", "longer than 1 s"),
        ("loops_in_c", "timeout", "longer than 1 s and was killed"),
        ("hoards", "error", "MemoryError"),
        ("crashes", "error", "SIGSEGV"),
        ("raises", "error", r"LookupError: no such \ud800 thing (given_graders.py:"),
        ("leaves", "error", "SystemExit: 3"),
        ("not_a_number", "error", "nan as the reward"),
        ("endless", "error", "inf as the reward"),
        ("wordy", "error", "str as the reward"),
        ("beyond_the_steps", "error", "step 7 of a trajectory with 1 steps"),
    ],
)
def test_only_the_guilty_item_fails(store: Store, grader: str, status: str, message: str) -> None:
    limit_s = 1 if status == "timeout" else 60
    manifest, frame = grade(store, rollouts_of(store, EPISODES), grader=own(grader), timeout_s=limit_s)
    statuses = by_episode(frame, "status")
    assert statuses.pop(GUILTY) == status
    assert set(statuses.values()) == {"ok"}
    assert by_episode(frame, "reward") == {episode: None if episode == GUILTY else 1.0 for episode in EPISODES}
    assert message in by_episode(frame, "explanation")[GUILTY]
    assert (manifest.summary["n_ok"], manifest.summary[f"n_{status}"]) == (8, 1)
    assert manifest.summary["mean_reward"] == 1.0


def test_too_many_failures_fail_the_stage_and_leave_nothing(store: Store) -> None:
    inputs = rollouts_of(store, EPISODES)
    with pytest.raises(StageFailed, match=r"1 of 9 gradings failed, more than the limit of 10%.*LookupError") as caught:
        grade(store, inputs, {"max_failed_share": 0.1}, grader=own("raises"))
    assert caught.value.exit_code == 1
    assert store.find("rewards", request(*inputs, grader=own("raises")).key) is None
    grade(store, inputs, {"max_failed_share": 0.12}, grader=own("raises"))


def test_a_grader_never_runs_in_this_process_and_its_workers_stay_warm(store: Store, tmp_path: Path) -> None:
    inputs = rollouts_of(store, EPISODES)
    config: dict[str, Any] = {"grader": own("marks_its_process"), "params": {"folder": str(tmp_path)}}
    grade(store, inputs, {"workers": 1}, **config)
    (worker,) = _pids(tmp_path)
    assert worker != os.getpid()
    grade(store, rollouts_of(store, {"t002-0": "4"}), {"workers": 1}, **config)
    assert _pids(tmp_path) == {worker}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name\ndef grade(task, episode): return 1.0", "nothing_of_this_name"),
        ("def grade(task): return 1.0", "is called as (task, episode)"),
    ],
)
def test_a_grader_that_cannot_be_loaded_is_refused_and_nothing_is_written(
    store: Store, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    inputs = rollouts_of(store, {"t001-0": "2"})
    asked = request(*inputs, grader=f"{tmp_path}/own.py:grade")
    with pytest.raises(InputError) as caught:
        grade(store, inputs, grader=f"{tmp_path}/own.py:grade")
    assert message in str(caught.value)
    assert not store.storage.exists(f"artifacts/rewards/{asked.key}/plan.json")


def test_a_worker_that_cannot_start_is_said(store: Store, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import os\nos._exit(9)\ndef grade(task, episode): return 1.0")
    with pytest.raises(StageFailed, match="the grading workers stopped"):
        grade(store, rollouts_of(store, {"t001-0": "2"}), grader=f"{tmp_path}/own.py:grade")


def test_results_do_not_depend_on_workers_chunks_or_shards(store: Store) -> None:
    inputs = rollouts_of(store, EPISODES, shards=3)
    made = []
    for execution in ({"workers": 1, "chunk_size": 1, "shard_episodes": 1}, {"workers": 2, "chunk_size": 4}):
        asked = request(*inputs, execution, grader="numeric")
        other = open_store(f"{store.url}-{execution['workers']}")
        inputs_there = rollouts_of(other, EPISODES, shards=3)
        assert request(*inputs_there, grader="numeric").key == asked.key
        manifest = materialise(other, request(*inputs_there, execution, grader="numeric")).manifest
        made.append((rows(other, manifest), manifest.summary))
    assert made[0][0].equals(made[1][0])
    assert made[0][1] == made[1][1]


def test_shards_in_several_threads_share_the_workers(store: Store, tmp_path: Path) -> None:
    inputs = rollouts_of(store, EPISODES, shards=9)
    config: dict[str, Any] = {"grader": own("marks_its_process"), "params": {"folder": str(tmp_path)}}
    asked = request(*inputs, {"shard_episodes": 1}, **config)
    with ThreadPoolExecutor(4) as threads:
        manifest = materialise(store, asked, map_shards=lambda work, ids: list(threads.map(work, ids))).manifest
    assert manifest.summary["n_ok"] == 9
    assert len({entry.shard for entry in manifest.files}) == 9
    assert len(_pids(tmp_path)) <= 2


def _pids(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}
