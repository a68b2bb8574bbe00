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
from tests.flows.commands import ROLLMILL, command, rollmill
from tests.flows.trained import Trained
from tests.stages.rollouts.processes import is_running

AGENT = '''
import asyncio
import os
from pathlib import Path

import rollmill

def note(name):
    """Leaves the process's number in a folder of this name."""
    Path(name).mkdir(exist_ok=True)
    (Path(name) / str(os.getpid())).touch()

@rollmill.rollout
async def solve(task, config):
    """Tells in which process it works, and waits there while a file says so."""
    note("processes")
    for _ in range(1200):
        if not Path("together").exists() or len(os.listdir("processes")) > 1:
            break
        await asyncio.sleep(0.1)
    while Path("hold").exists() and task.id in Path("hold").read_text().split():
        note("holding")
        await asyncio.sleep(0.1)
    await config.chat([{"role": "user", "content": task.instruction}])
'''
WHAT = ["task_id", "rollout_index", "response_ids", "logprobs", "seed", "policy_id"]
elsewhere = pytest.mark.parametrize("kind", ["ray", "dask"])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an agent in it, where commands are called."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    monkeypatch.chdir(folder)
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
    file = here / "hold"
    file.write_text(" ".join(tasks_of(store)[2:]))
    return file


def tasks_of(store: str | Path) -> list[str]:
    tasks = public.scan("tiny:tasks", "tasks", store=open_store(str(store))).select("task_id").collect()
    return sorted(tasks["task_id"])


def processes(here: Path, what: str = "processes") -> list[int]:
    return [int(file.name) for file in (here / what).glob("*")]


def n_receipts(store: str | Path) -> int:
    return len(list(Path(store).glob("artifacts/rollouts/*/receipts/*.json")))


@pytest.fixture(scope="module")
def by_threads(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    """What is sampled in threads of the command's own process."""
    folder = tmp_path_factory.mktemp("threads")
    (folder / "agent.py").write_text(AGENT)
    shutil.copytree(trained.url, folder / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = rollmill(*sampling(folder / "store"))
    assert done.code == 0, done.text
    assert processes(folder) == [os.getpid()]
    return rows(folder / "store", done.out)


@pytest.mark.slow
@elsewhere
@pytest.mark.usefixtures("given_ray")  # a cluster of somebody else's on this machine is in nobody's way
def test_two_processes_make_the_rows_that_threads_make_though_one_is_killed(
    by_threads, trained_copy, tmp_path, here, kind
):
    before = n_receipts(trained_copy.url)
    hold = held(trained_copy.url, here)
    words = sampling(trained_copy.url, f"execution.runner.type={kind}", "execution.runner.workers=2")
    with background(command(*words), tmp_path / "log", {}, here) as running:
        running.wait_until(lambda: n_receipts(trained_copy.url) > before and len(processes(here, "holding")) == 2)
        os.kill(processes(here, "holding")[0], signal.SIGKILL)  # it was at work on a shard
        hold.unlink()
        assert running.wait() == 0, running.output  # nothing that it started is left
    assert n_receipts(trained_copy.url) == before + 6
    assert running.process.pid not in processes(here)
    made = rows(trained_copy.url, running.output)
    assert made.drop("logprobs").equals(by_threads.drop("logprobs"))
    # Which calls share a batch is chance, and so are the last bits of the arithmetic.
    assert np.allclose(made["logprobs"].explode(), by_threads["logprobs"].explode(), rtol=0, atol=1e-5)
    assert len(made) == 12 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "workers"),
    [
        ("ray", signal.SIGKILL, 1),  # what ends Ray's processes is a guard of ours
        ("dask", signal.SIGINT, 1),  # which Dask's processes must not see
        pytest.param("ray", signal.SIGINT, 2, marks=pytest.mark.full),
        pytest.param("ray", signal.SIGKILL, 2, marks=pytest.mark.full),
        pytest.param("dask", signal.SIGINT, 2, marks=pytest.mark.full),
        pytest.param("dask", signal.SIGKILL, 2, marks=pytest.mark.full),
    ],
)
def test_a_command_that_is_ended_leaves_no_process_and_goes_on(trained_copy, tmp_path, here, kind, number, workers):
    before = n_receipts(trained_copy.url)
    words = sampling(trained_copy.url, f"execution.runner.type={kind}", f"execution.runner.workers={workers}")
    hold = held(trained_copy.url, here)
    with background(command(*words), tmp_path / "log", {}, here) as running:
        running.wait_until(lambda: n_receipts(trained_copy.url) > before)
        running.ended_by(number)
        assert "Traceback" not in running.output
    assert n_receipts(trained_copy.url) == before + 1
    hold.unlink()
    done = rollmill(*sampling(trained_copy.url))
    assert done.code == 0, done.text
    assert n_receipts(trained_copy.url) == before + 6


@pytest.fixture(scope="module")
def given_dask() -> Iterator[str]:
    """The address of a cluster with two processes."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster.scheduler_address


@pytest.fixture(scope="module")
def given_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same of Ray; this process is then one of those that it accepts."""
    folder = tmp_path_factory.mktemp("ray")
    port, client_port = free_ports(2)
    words = ["start", "--head", "--block", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    words += ["--node-ip-address=127.0.0.1", f"--port={port}", f"--ray-client-server-port={client_port}"]
    handler = signal.getsignal(signal.SIGTERM)  # Ray sets one of its own
    ray = str(ROLLMILL.with_name("ray"))
    with background([ray, *words], folder / "log", {"RAY_AUTH_MODE": "disabled"}, folder) as running:
        running.wait_until(lambda: "Ray runtime started" in running.output)
        yield f"127.0.0.1:{port}"
    signal.signal(signal.SIGTERM, handler)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@pytest.fixture
def on_given(request: pytest.FixtureRequest, kind: str) -> list[str]:
    """Settings for that kind of cluster."""
    address = request.getfixturevalue(f"given_{kind}")
    return [f"execution.runner.type={kind}", f"execution.runner.address={address}"]


@pytest.mark.slow
@elsewhere
def test_a_given_cluster_is_used_and_left_running(by_threads, trained_copy, here, on_given, kind):
    (here / "together").touch()  # each of its two processes waits until the other is at work, too
    done = rollmill(*sampling(trained_copy.url, *on_given))
    assert done.code == 0, done.text
    used = processes(here)
    assert len(used) == 2
    assert os.getpid() not in used
    host, port = on_given[1].rpartition("/")[2].rpartition("=")[2].split(":")
    socket.create_connection((host, int(port)), timeout=60).close()
    if kind == "dask":  # Ray ends those that have worked for a command, and keeps the cluster
        assert all(map(is_running, used))
    made = rows(trained_copy.url, done.out)
    assert made.drop("logprobs").equals(by_threads.drop("logprobs"))


@pytest.mark.slow
@elsewhere
def test_what_fails_there_is_told_here_as_if_it_had_failed_here(trained_copy, here, on_given, kind):
    (here / "agent.py").write_text("import rollmill\n\n@rollmill.rollout\ndef other(task, config):\n    return None\n")
    words = sampling(trained_copy.url, *on_given, "execution.shard_tasks=12", "execution.probe_tolerance=1e-30")
    words[words.index("agent=agent.py:solve")] = "agent=agent.py:other"
    done = rollmill(*words)
    assert done.code == 1
    assert "does not reproduce the probe" in done.err
    assert "Traceback" not in done.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dask"])
def test_code_that_has_changed_is_run_as_it_is_now_by_processes_that_outlive_the_command(
    trained_copy, here, monkeypatch, on_given
):
    monkeypatch.syspath_prepend(here)
    words = sampling(trained_copy.url, *on_given)
    words[words.index("agent=agent.py:solve")] = "agent=own_agent:solve"
    (here / "own_agent.py").write_text(
        AGENT.replace("task.instruction", "question()") + "\nfrom wording import question\n"
    )
    for wording in ("first", "second"):
        for name in ("own_agent", "wording"):
            monkeypatch.delitem(sys.modules, name, raising=False)  # in this process, as if it were another command's
        (here / "wording.py").write_text(f"def question():\n    return {wording!r}\n")
        (here / "own_agent.py").write_text((here / "own_agent.py").read_text() + "\n")  # so that the key is another
        done = rollmill(*words)
        assert done.code == 0, done.text
        (reference,) = set(re.findall(r"rollouts/[0-9a-f]{12,}", done.text))
        steps = public.scan(reference, "steps", store=open_store(trained_copy.url)).select("messages").collect()
        assert all(wording in messages for messages in steps["messages"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "retries"),
    [
        ("ray", 0),  # as a process takes seconds to start
        pytest.param("ray", 3, marks=pytest.mark.full),
        pytest.param("dask", 3, marks=pytest.mark.full),
    ],
)
def test_a_shard_that_ends_every_process_is_told_and_the_others_are_kept(
    trained_copy, here, monkeypatch, on_given, kind, retries
):
    monkeypatch.setenv("RAY_TASK_MAX_RETRIES", str(retries))  # Ray's own setting; 3 is the default, and Dask's
    first = (
        public.scan("tiny:tasks", "tasks", store=open_store(trained_copy.url)).select("task_id").collect().item(0, 0)
    )
    fatal = f'if task.id == "{first}" and os.getpid() != {os.getpid()}:\n        os.kill(os.getpid(), 9)\n    '
    (here / "agent.py").write_text(AGENT.replace("while Path", fatal + "while Path", 1))
    before = n_receipts(trained_copy.url)
    done = rollmill(*sampling(trained_copy.url, *on_given))
    assert done.code == 1, done.text
    assert "a process of the cluster has died over a shard" in done.err
    assert "Traceback" not in done.text
    assert n_receipts(trained_copy.url) == before + 5


@pytest.mark.slow
def test_what_is_no_dask_cluster_or_has_no_processes_is_told(trained_copy, here):
    from distributed import LocalCluster

    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as empty,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        for address, told in (
            (empty.scheduler_address, "it has no processes that work"),
            (f"tcp://127.0.0.1:{silent.getsockname()[1]}", "has not answered as a Dask cluster within 1 s"),
        ):
            runner = f"{{type: dask, address: '{address}', connect_s: {1 if 'answered' in told else 60}}}"
            done = rollmill(*sampling(trained_copy.url, f"execution.runner={runner}"))
            assert done.code == 1
            assert told in done.err
            assert "Traceback" not in done.text


def refusal(store: str | Path, *words: str) -> str:
    done = rollmill(*sampling(store, *words))
    assert done.code == 2
    assert "Traceback" not in done.text
    return done.err


@elsewhere
def test_a_package_that_is_missing_is_named(trained_copy, here, monkeypatch, kind):
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
def test_a_cluster_that_does_not_answer_is_refused_before_any_work(trained_copy, here, kind, address, told):
    words = [f"execution.runner.type={kind}", f"execution.runner.address={address}"]
    assert told.format(kind) in refusal(trained_copy.url, *words)


def test_a_store_that_only_this_process_sees_is_refused(recipe_file):
    done = rollmill("train", recipe_file, "execution.rollouts.runner.type=ray", "--store", "memory://alone")
    assert done.code == 2
    assert "is seen by this process alone" in done.err


def test_processes_of_one_machine_do_not_each_start_vllm(trained_copy, here):
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


def test_threads_take_no_address(trained_copy, here):
    assert "set type to ray or dask" in refusal(trained_copy.url, "execution.runner.address=tcp://127.0.0.1:9")
