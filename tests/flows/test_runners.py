"""Shards of rollouts in the processes of a Ray or Dask cluster: the same rows as in threads, nothing left behind."""

import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import rollmill as public
from stages.artifacts.store import open_store
from tests.flows.background import background
from tests.flows.commands import command, rollmill, rollmill_process

AGENT = '''
import asyncio
import os
from pathlib import Path

import rollmill

@rollmill.rollout
async def solve(task, config):
    """Tells in which process it works, and takes a moment, so that no process can do all the work."""
    Path("processes").mkdir(exist_ok=True)
    (Path("processes") / str(os.getpid())).touch()
    await asyncio.sleep(0.3)
    while Path("hold").exists() and task.id in Path("hold").read_text().split():
        await asyncio.sleep(0.1)
    await config.chat([{"role": "user", "content": task.instruction}])
'''
WHAT = ["task_id", "rollout_index", "response_ids", "logprobs", "seed", "policy_id"]
elsewhere = pytest.mark.parametrize("kind", ["ray", "dask"])


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with an agent in it, where commands are called."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    return folder


def sampling(store: str | Path, *more: str) -> list[str]:
    """A command that samples again from the tiny run's first policy: six shards of two tasks, four attempts each."""
    inputs = ["tasks=tiny:tasks", "policy=tiny@0:policy_in"]
    config = ["agent=agent.py:solve", "n=4", "sampling.max_tokens=6"]
    how = ["execution.shard_tasks=2", "execution.threads=1"]
    return ["stage", "rollouts", *inputs, *config, *how, *more, "--draw", "7", "--store", str(store)]


def rows(store: str | Path, output: str) -> pl.DataFrame:
    """What was sampled by that command, which printed ``output``."""
    shelf = open_store(str(store))
    (reference,) = set(re.findall(r"rollouts/[0-9a-f]{12,}", output))
    episodes = public.scan(reference, "episodes", store=shelf).select(
        "episode_id", "task_id", "rollout_index", "status"
    )
    steps = public.scan(reference, "steps", store=shelf).join(episodes, on="episode_id")
    return steps.select(*WHAT, "status").sort("task_id", "rollout_index").collect()


def held(store: str | Path, here: Path) -> Path:
    """A file that holds up all but the first shard, for as long as it is there."""
    tasks = public.scan("tiny:tasks", "tasks", store=open_store(str(store))).select("task_id").collect()["task_id"]
    file = here / "hold"
    file.write_text(" ".join(tasks.sort()[2:]))
    return file


def processes(here: Path) -> list[int]:
    return [int(file.name) for file in (here / "processes").glob("*")]


def n_receipts(store: str | Path) -> int:
    return len(list(Path(store).glob("artifacts/rollouts/*/receipts/*.json")))


@pytest.mark.slow
@elsewhere
def test_two_processes_make_the_rows_that_threads_make(trained, trained_copy, tmp_path, here, kind):
    plain = tmp_path / "plain"
    shutil.copytree(trained.url, plain)
    threads = rollmill_process(*sampling(plain), cwd=here)
    assert threads.code == 0, threads.text
    shutil.rmtree(here / "processes")
    words = sampling(trained_copy.url, f"execution.runner.type={kind}", "execution.runner.workers=2")
    with background(command(*words), tmp_path / "log", {}, here) as running:
        assert running.wait(timeout_s=120) == 0, running.output  # nothing that it started is left
    assert running.process.pid not in processes(here)
    assert len(processes(here)) == 2
    made, expected = rows(trained_copy.url, running.output), rows(plain, threads.text)
    assert made.drop("logprobs").equals(expected.drop("logprobs"))
    # Which calls share a batch is chance, and so are the last bits of the arithmetic.
    assert np.allclose(made["logprobs"].explode(), expected["logprobs"].explode(), rtol=0, atol=1e-5)
    assert len(made) == 12 * 4


@pytest.mark.slow
@elsewhere
def test_a_shard_whose_process_is_killed_is_done_by_another(trained_copy, tmp_path, here, kind):
    words = sampling(trained_copy.url, f"execution.runner.type={kind}")
    before = n_receipts(trained_copy.url)
    hold = held(trained_copy.url, here)
    with background(command(*words), tmp_path / "log", {}, here) as running:
        running.wait_until(lambda: n_receipts(trained_copy.url) > before)
        os.kill(processes(here)[0], signal.SIGKILL)
        hold.unlink()
        assert running.wait(timeout_s=120) == 0, running.output
    assert n_receipts(trained_copy.url) == before + 6
    assert len(rows(trained_copy.url, running.output)) == 12 * 4


@pytest.mark.slow
@elsewhere
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process_and_goes_on(trained_copy, tmp_path, here, kind, number):
    before = n_receipts(trained_copy.url)
    words = sampling(trained_copy.url, f"execution.runner.type={kind}")
    hold = held(trained_copy.url, here)
    with background(command(*words), tmp_path / "log", {}, here) as running:
        running.wait_until(lambda: n_receipts(trained_copy.url) > before)
        running.ended_by(number, timeout_s=60)
        assert "Traceback" not in running.output
    assert n_receipts(trained_copy.url) == before + 1
    hold.unlink()
    done = rollmill_process(*sampling(trained_copy.url), cwd=here)
    assert done.code == 0, done.text
    assert n_receipts(trained_copy.url) == before + 6


@pytest.mark.slow
@elsewhere
def test_what_fails_there_is_told_here_as_if_it_had_failed_here(trained_copy, tmp_path, here, kind):
    (here / "agent.py").write_text("import rollmill\n\n@rollmill.rollout\ndef other(task, config):\n    return None\n")
    words = sampling(trained_copy.url, f"execution.runner.type={kind}", "execution.probe_tolerance=1e-30")
    words[words.index("agent=agent.py:solve")] = "agent=agent.py:other"
    with background(command(*words), tmp_path / "log", {}, here) as running:
        assert running.wait(timeout_s=120) == 1
    assert "does not reproduce the probe" in running.output
    assert "Traceback" not in running.output


@pytest.mark.slow
@elsewhere
def test_a_shard_that_ends_every_process_is_told_and_the_others_are_kept(trained_copy, tmp_path, here, kind):
    agent = AGENT.replace("    while", '    if task.id == "t-fatal":\n        os.kill(os.getpid(), 9)\n    while', 1)
    fatal = open_store(trained_copy.url)
    first = public.scan("tiny:tasks", "tasks", store=fatal).select("task_id").collect()["task_id"][0]
    (here / "agent.py").write_text(agent.replace("t-fatal", first))
    before = n_receipts(trained_copy.url)
    words = sampling(trained_copy.url, f"execution.runner.type={kind}")
    with background(command(*words), tmp_path / "log", {}, here) as running:
        assert running.wait(timeout_s=200) == 1
    assert "a process of the cluster has died over a shard" in running.output
    assert "Traceback" not in running.output
    assert n_receipts(trained_copy.url) == before + 5


@pytest.fixture
def given_dask() -> Iterator[str]:
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


@pytest.mark.slow
def test_a_given_cluster_is_used_and_left_running(trained_copy, here, given_dask):
    from distributed import Client

    words = sampling(trained_copy.url, "execution.runner.type=dask", f"execution.runner.address={given_dask}")
    done = rollmill_process(*words, cwd=here)
    assert done.code == 0, done.text
    with Client(given_dask) as client:
        pids = set(client.run(os.getpid).values())
    assert pids == set(processes(here))


@pytest.mark.slow
def test_code_that_has_changed_is_run_as_it_is_now_by_processes_that_outlive_the_command(
    trained_copy, here, given_dask
):
    words = sampling(trained_copy.url, "execution.runner.type=dask", f"execution.runner.address={given_dask}")
    words[words.index("agent=agent.py:solve")] = "agent=own_agent:solve"
    (here / "own_agent.py").write_text(
        AGENT.replace("task.instruction", "question()") + "\nfrom wording import question\n"
    )
    for wording in ("first", "second"):
        (here / "wording.py").write_text(f"def question():\n    return {wording!r}\n")
        (here / "own_agent.py").write_text((here / "own_agent.py").read_text() + "\n")  # so that the key is another
        done = rollmill_process(*words, cwd=here)
        assert done.code == 0, done.text
        (reference,) = set(re.findall(r"rollouts/[0-9a-f]{12,}", done.text))
        steps = public.scan(reference, "steps", store=open_store(trained_copy.url)).select("messages").collect()
        assert all(wording in messages for messages in steps["messages"])


@pytest.mark.slow
def test_what_is_no_dask_cluster_or_has_no_processes_is_told(trained_copy, here):
    from distributed import LocalCluster

    with LocalCluster(n_workers=0, dashboard_address=None) as empty, socket.create_server(("127.0.0.1", 0)) as silent:
        for address, told in (
            (empty.scheduler_address, "it has no processes that work"),
            (f"tcp://127.0.0.1:{silent.getsockname()[1]}", "has not answered as a Dask cluster"),
        ):
            words = sampling(trained_copy.url, "execution.runner.type=dask", f"execution.runner.address={address}")
            done = rollmill_process(*words, cwd=here, timeout_s=90)
            assert done.code == 1
            assert told in done.err
            assert "Traceback" not in done.err


def refusal(store: str | Path, *words: str) -> str:
    done = rollmill(*sampling(store, *words))
    assert done.code == 2
    assert "Traceback" not in done.text
    return done.err


@elsewhere
def test_a_package_that_is_missing_is_named(trained_copy, here, monkeypatch, kind):
    monkeypatch.chdir(here)
    monkeypatch.setitem(sys.modules, f"prefect_{kind}", None)
    told = refusal(trained_copy.url, f"execution.runner.type={kind}")
    assert f"runner.type={kind} needs the package prefect_{kind}" in told
    assert f"pip install 'rollmill[{kind}]'" in told


@elsewhere
@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:9", "no {} cluster answers at 127.0.0.1:9"),
        ("nowhere", "is no address such as"),
        ("http://127.0.0.1:9", "is no address such as"),
        ("127.0.0.1:99999", "is no address such as"),
    ],
)
def test_a_cluster_that_does_not_answer_is_refused_before_any_work(
    trained_copy, here, monkeypatch, kind, address, told
):
    monkeypatch.chdir(here)
    words = [f"execution.runner.type={kind}", f"execution.runner.address={address}"]
    assert told.format(kind) in refusal(trained_copy.url, *words)


def test_a_store_that_only_this_process_sees_is_refused(recipe_file):
    done = rollmill("train", recipe_file, "execution.rollouts.runner.type=ray", "--store", "memory://alone")
    assert done.code == 2
    assert "is seen by this process alone" in done.err


def test_processes_of_one_machine_do_not_each_start_vllm(trained_copy, here, monkeypatch):
    monkeypatch.chdir(here)
    told = refusal(trained_copy.url, "engine.type=vllm", "execution.runner.type=dask")
    assert "each of the 2 processes" in told


def test_a_run_that_has_finished_needs_no_cluster(trained_copy):
    runner = "execution.rollouts.runner={type: dask, address: tcp://127.0.0.1:9}"
    done = rollmill("train", trained_copy.recipe, "run=tiny", runner, "--store", trained_copy.url)
    assert done.code == 0, done.text
    assert "has finished; no stage was executed" in done.out


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("execution.rollouts.runner={type: dask, address: tcp://127.0.0.1:9}", "no dask cluster answers"),
        ("rollouts.engine={type: vllm, python: /nowhere/python}", "there is no Python at /nowhere/python"),
    ],
)
def test_what_the_rollouts_lack_is_told_before_a_policy_is_made_for_them(prefect, recipe_file, tmp_path, setting, told):
    done = rollmill("train", recipe_file, setting, "--store", tmp_path / "store")
    assert done.code == 2
    assert told in done.err
    assert not list((tmp_path / "store").glob("artifacts/policy/*/manifest.json"))


def test_threads_take_no_address(trained_copy, here, monkeypatch):
    monkeypatch.chdir(here)
    assert "set type to ray or dask" in refusal(trained_copy.url, "execution.runner.address=tcp://127.0.0.1:9")
