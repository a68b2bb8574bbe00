"""Kill -9 at any moment: the same command finishes the work, and the result is that of an uninterrupted one."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file

import rollmill as public
from schemas.artifacts import Manifest
from stages.artifacts.gc import collect_garbage
from stages.artifacts.store import Store, open_store
from stages.artifacts.verify import verify
from tests.flows.commands import command, contents, rollmill
from tests.flows.one_stage import MARK, POINTS, StageWork, processes_with, run_in_a_process
from tests.flows.trained import Trained

WORKS = {
    "tasks": StageWork("tasks", config={"benchmark": "arithmetic", "limit": 9}, execution={"shard_rows": 3}),
    "rollouts": StageWork(
        "rollouts",
        {"tasks": "tiny:tasks", "policy": "tiny:policy"},
        {"n": 3, "sampling": {"max_tokens": 6}},
        {"shard_tasks": 4, "threads": 1},
    ),
    "rewards": StageWork(
        "rewards", {"rollouts": "tiny:rollouts"}, {"grader": "exact"}, {"shard_episodes": 8, "workers": 1}
    ),
    "advantages": StageWork("advantages", {"rewards": "tiny:rewards"}, {"estimator": "rloo"}),
    "policy": StageWork("policy", {"advantages": "tiny:advantages"}, {"optimizer": {"lr": 0.02}}, {"threads": 1}),
    "policy_warmstart": StageWork(
        "policy_warmstart",
        {"policy": "tiny:policy", "tasks": "tiny:tasks"},
        {"steps": 3, "tokens_per_step": 64},
        {"threads": 1},
    ),
    "report": StageWork("report", {"rewards": ["tiny@0:rewards", "tiny:rewards"]}),
}
DETERMINISTIC = ("tasks", "advantages", "report")
"""Byte-identical whenever they are made; of the others the columns that measure the work itself differ."""
MEASURED = {
    "rollouts": ["started_at", "duration_s", "latency_s", "worker"],
    "rewards": ["duration_s"],
    "policy": ["recorded_at"],
    "policy_warmstart": ["recorded_at"],
}
TIMINGS = ("tokens_per_s", "train_s")
"""Metrics that measure the work itself."""


@pytest.fixture(scope="module")
def finished(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Store, Manifest]]:
    """By stage: the uninterrupted result, made when it is first asked for."""
    return _Finished(trained, tmp_path_factory.mktemp("finished"))


class _Finished(dict[str, tuple[Store, Manifest]]):
    def __init__(self, trained: Trained, folder: Path):
        self._trained, self._folder = trained, folder

    def __missing__(self, name: str) -> tuple[Store, Manifest]:
        url = self._folder / name
        shutil.copytree(self._trained.url, url)
        assert run_in_a_process(str(url), WORKS[name]) == 0
        store = open_store(url, writable=False)
        self[name] = store, made_by(store, self._trained, name)
        return self[name]


def made_by(store: Store, trained: Trained, name: str) -> Manifest:
    """The one artifact of the kind that the copied store did not hold."""
    kind = name.partition("_")[0]
    before = {path.name for path in (Path(trained.url) / "artifacts" / kind).iterdir()}
    (key,) = {path.name for path in (Path(store.url) / "artifacts" / kind).iterdir()} - before
    return store.resolve(f"{kind}/{key}")


SLOW = ("rollouts", "rewards", "policy", "policy_warmstart")
TELLING = ("in the work", "after the first receipt")
"""Points at which a slow stage is killed in ``make test``: something was begun, something was finished."""


def marks(name: str, point: str) -> list[pytest.MarkDecorator]:
    if name not in SLOW:
        return []
    return [pytest.mark.slow] if point in TELLING else [pytest.mark.slow, pytest.mark.full]


CASES = [
    pytest.param(name, point, id=f"{name}-{point}", marks=marks(name, point))
    for name in WORKS
    for point in POINTS
    if not (name == "advantages" and point == "in the work")  # a fraction of a second, and reports no progress
]


@pytest.mark.parametrize(("name", "point"), CASES)
def test_a_stage_killed_anywhere_is_finished_by_the_same_command(finished, trained, trained_copy, name, point):
    before, mark = contents(Path(trained_copy.url)), secrets.token_hex(8)
    assert run_in_a_process(trained_copy.url, WORKS[name], point, mark) == -signal.SIGKILL
    await_end_of(mark)
    left = {path: status for path, status in contents(Path(trained_copy.url)).items() if ".tmp-" not in path}
    assert {path: left[path] for path in before} == before
    assert not [path for path in set(left) - set(before) if path.endswith("manifest.json")], "it looks finished"

    assert run_in_a_process(trained_copy.url, WORKS[name], None, mark) == 0
    await_end_of(mark)
    after = contents(Path(trained_copy.url))
    assert {path: after[path] for path in left} == left, "something that was finished was made again"
    store = open_store(trained_copy.url)
    made, (other_store, uninterrupted) = made_by(store, trained, name), finished[name]
    assert_the_same(name, store, made, other_store, uninterrupted)

    collect_garbage(store, grace_s=0, delete=True)
    assert verify(store, made) > 0
    assert set(contents(Path(store.url))) - set(after) == set()
    assert not [path for path in contents(Path(store.url)) if ".tmp-" in path], "garbage is left"


@pytest.mark.parametrize("kind", ["a program", "a process"])
def test_agents_end_with_a_killed_stage_and_so_does_everything_that_they_have_started(trained_copy, tmp_path, kind):
    flag, mark = str(tmp_path / "flag"), secrets.token_hex(8)
    agents = Path("tests/stages/rollouts").resolve()
    agent: dict[str, Any] = {"agent": {"command": [sys.executable, str(agents / "program.py"), "waits", flag]}}
    if kind == "a process":
        agent = {"agent": f"{agents / 'given_agents.py'}:one_ends_and_others_hang", "agent_config": {"file": flag}}
    work = StageWork(
        "rollouts",
        {"tasks": "tiny:tasks", "policy": "tiny:policy"},
        {"engine": {"type": "scripted"}, **agent},
        {"agents": "processes", "shard_tasks": 100},
    )
    assert run_in_a_process(trained_copy.url, work, "in the work", mark) == -signal.SIGKILL
    await_end_of(mark)


def assert_the_same(name: str, store: Store, made: Manifest, other_store: Store, other: Manifest) -> None:
    assert made.key == other.key
    assert [(entry.table, entry.rows, entry.shard) for entry in made.files] == [
        (entry.table, entry.rows, entry.shard) for entry in other.files
    ]
    for table in made.schema_versions:
        one, two = (
            public.scan(manifest, table, store=shelf).collect().drop(MEASURED.get(name, []), strict=False)
            for shelf, manifest in ((store, made), (other_store, other))
        )
        if table == "metrics":
            one, two = (frame.filter(~pl.col("name").is_in(TIMINGS)) for frame in (one, two))
        if table == "steps":
            logprobs = [np.concatenate(frame["logprobs"].to_list()) for frame in (one, two)]
            assert np.abs(logprobs[0] - logprobs[1]).max() < 1e-5
            one, two = one.drop("logprobs"), two.drop("logprobs")
        assert one.equals(two), table
    if name in DETERMINISTIC:
        assert made.files == other.files
        assert made.digest == other.digest
    parts = [{e.name: e.sha256 for e in manifest.files if e.rows is None} for manifest in (made, other)]
    assert parts[0] == parts[1], "weights, optimizer state and page are the same, byte for byte"


def await_end_of(mark: str) -> None:
    """Every process that the killed one had started ends by itself."""
    until = time.monotonic() + 90
    while alive := processes_with(mark):
        assert time.monotonic() < until, f"processes {alive} outlive the command that was killed"
        time.sleep(0.05)


@pytest.fixture
def training(trained: Trained, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``rollmill train`` as a process, and waits until it has made so many files of a name."""
    started: list[subprocess.Popen[str]] = []

    def start(mark: str, pattern: str, count: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command("train", trained.recipe, "run=tiny", "--store", tmp_path / "store"),
            env={**os.environ, MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        until = time.monotonic() + 300
        while len(list((tmp_path / "store").glob(pattern))) < count:
            assert process.poll() is None, "it ended too soon"
            assert time.monotonic() < until, f"{pattern} did not appear"
            time.sleep(0.002)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends",
    [
        [
            (signal.SIGKILL, "artifacts/rollouts/*/receipts/*.json", 1),
            (signal.SIGINT, "runs/tiny/iterations/00000.json", 1),
            (signal.SIGKILL, "artifacts/rollouts/*/manifest.json", 2),
        ],
        pytest.param(
            [
                (signal.SIGKILL, "runs/tiny/iterations/00000.json", 1),
                (signal.SIGKILL, "artifacts/advantages/*/manifest.json", 2),
            ],
            marks=pytest.mark.full,
        ),
    ],
    ids=["and interrupted", "killed only"],
)
def test_a_training_killed_again_and_again_is_finished_by_the_same_command(trained, training, tmp_path, ends):
    mark = secrets.token_hex(8)
    for how, pattern, count in ends:
        process = training(mark, pattern, count)
        process.send_signal(how)
        _, err = process.communicate(timeout=120)
        assert not (tmp_path / "store/runs/tiny/end.json").exists(), "it was too quick to be killed"
        if how == signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == 130, err
            assert "Traceback" not in err
            assert err.splitlines()[-1] == "interrupted; nothing finished is lost, the same command continues"
        await_end_of(mark)
    done = rollmill("train", trained.recipe, "run=tiny", "--store", tmp_path / "store")
    assert done.code == 0, done.text
    store = open_store(tmp_path / "store", writable=False)
    assert store.run_end("tiny") is not None
    for record, other in zip(store.iterations("tiny"), trained.store.iterations("tiny"), strict=True):
        sampled = [
            attempts(shelf, shelf.manifest(one.artifacts["rollouts"]))
            for shelf, one in ((store, record), (trained.store, other))
        ]
        assert sampled[0].equals(sampled[1]), f"iteration {record.iteration}"
        weights = [
            load_file(shelf.folder(shelf.manifest(one.artifacts["policy"]), "checkpoint") / "model.safetensors")
            for shelf, one in ((store, record), (trained.store, other))
        ]
        for name, tensor in weights[0].items():
            assert np.abs(tensor - weights[1][name]).max() < 1e-5, name


def attempts(store: Store, rollouts: Manifest) -> pl.DataFrame:
    """Sampled tokens by task and attempt."""
    episodes = public.scan(rollouts, "episodes", store=store).select("episode_id", "task_id", "rollout_index")
    steps = public.scan(rollouts, "steps", store=store).select("episode_id", "response_ids")
    return episodes.join(steps, on="episode_id").sort("task_id", "rollout_index").drop("episode_id").collect()


@pytest.mark.slow
def test_two_commands_that_train_the_same_run_at_once_make_one_run(trained, tmp_path):
    words = command("train", trained.recipe, "run=tiny", "--store", tmp_path / "store")
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [(*process.communicate(timeout=400), process.returncode) for process in both]
    assert [code for _, _, code in ended] == [0, 0], ended
    store = open_store(tmp_path / "store", writable=False)
    records = store.iterations("tiny")
    assert [record.iteration for record in records] == [0, 1]
    assert store.run_end("tiny") is not None
    made = {ref for record in records for ref in record.artifacts.values()}
    for kind in ("tasks", "policy", "rollouts", "rewards", "advantages"):
        there = [path for path in (tmp_path / "store/artifacts" / kind).iterdir() if (path / "manifest.json").exists()]
        assert len(there) == len({ref for ref in made if ref.kind == kind}), f"{kind} were made twice"
    for ref in made:
        assert verify(store, ref) > 0
