"""The trainer's process: warm or cold the same, its errors told, and gone when the pipeline is gone."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import ConfigError, InputError, StageFailed
from stages.artifacts.store import Store
from stages.policy.checkpoint import content_of
from stages.policy.settings import TrainerExecution
from stages.policy.stage import prestart
from stages.policy.trainer import client
from tests.builders import given
from tests.stages.policy.stored import (
    EXECUTION,
    advantages_of,
    contents_of,
    metrics_of,
    rollouts_of,
    tiny_policy,
    updated,
)
from tests.stages.rollouts.processes import descendants, eventually, is_running

ROOT = Path(__file__).resolve().parents[3]


def test_a_warm_trainer_and_a_cold_one_make_the_same_bytes(store: Store) -> None:
    optimizer = {"lr": 1e-3, "weight_decay": 0.1}
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    advantages = advantages_of(store, rollouts)
    client.stop()
    first = updated(store, policy, rollouts, advantages, optimizer=optimizer)
    warm = updated(store, first, rollouts, advantages, optimizer=optimizer)
    assert client._current is not None
    assert client._current[1].holds is not None
    assert client._current[1].holds[0] == content_of(warm)
    client.stop()
    cold = updated(store, first, rollouts, advantages, optimizer=optimizer, logprob_tolerance=0.5)
    assert cold.key != warm.key
    assert contents_of(cold) == contents_of(warm)
    assert len({content_of(made) for made in (policy, first, warm)}) == 3


def test_a_trainer_that_holds_another_policy_loads_the_one_that_is_asked_for(store: Store) -> None:
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    advantages = advantages_of(store, rollouts)
    first = updated(store, policy, rollouts, advantages)
    second = updated(store, first, rollouts, advantages)
    again = updated(store, policy, rollouts, advantages, logprob_tolerance=0.5)
    assert contents_of(again) == contents_of(first) != contents_of(second)


def test_the_optimizer_goes_on_where_it_was_unless_it_is_reset(store: Store) -> None:
    from safetensors.numpy import load_file

    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    advantages = advantages_of(store, rollouts)
    first = updated(store, policy, rollouts, advantages)
    for reset, steps in ((False, 2), (True, 1)):
        second = updated(store, first, rollouts, advantages, optimizer={"lr": 1e-3, "reset": reset})
        state = load_file(store.folder(second, "optimizer") / "optimizer.safetensors")
        assert state["step"] == steps


def test_the_warm_up_goes_on_over_updates(store: Store) -> None:
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    advantages = advantages_of(store, rollouts)
    rates = []
    for _ in range(3):
        policy = updated(store, policy, rollouts, advantages, schedule={"warmup_steps": 4})
        rates.append(metrics_of(store, policy)["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])


def test_what_the_trainer_refuses_is_told_here_and_it_goes_on(store: Store) -> None:
    import numpy as np
    from safetensors.numpy import save

    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    advantages = advantages_of(store, rollouts)
    folder = store.folder(policy, "checkpoint")
    foreign = given(
        store,
        "policy",
        {"probe": store.inputs({"p": [policy]}).scan("p", "probe").collect().to_dicts()},
        parts={
            "checkpoint": {file.name: file.read_bytes() for file in folder.iterdir()},
            "optimizer": {"optimizer.safetensors": save({"step": np.array(3), "exp_avg/other": np.zeros(2)})},
        },
    )
    with pytest.raises(InputError, match=r"holds no exp_avg of the parameter model\."):
        updated(store, foreign, rollouts, advantages)
    assert client._current is not None
    process = client._current[1]._process.pid
    updated(store, policy, rollouts, advantages)
    assert client._current[1]._process.pid == process


def test_a_loss_that_is_not_finite_stores_nothing_and_loses_nothing(store: Store) -> None:
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    advantages = advantages_of(store, rollouts)
    before = updated(store, policy, rollouts, advantages)
    wild = rollouts_of(store, policy, logprobs=[float("-inf")], response_ids=[9])
    with pytest.raises(StageFailed, match=r"gradient's norm is|the loss is"):
        updated(store, policy, wild, advantages_of(store, wild), loss={"eps_high": 1e30})
    after = updated(store, policy, rollouts, advantages, logprob_tolerance=0.5)
    assert contents_of(after) == contents_of(before)


def test_a_trainer_that_was_killed_is_told_with_its_log_and_replaced(store: Store) -> None:
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    advantages = advantages_of(store, rollouts)
    updated(store, policy, rollouts, advantages)
    assert client._current is not None
    trainer = client._current[1]
    os.kill(trainer._process.pid, signal.SIGSTOP)  # so that it is still there when the next job comes
    os.kill(trainer._process.pid, signal.SIGKILL)
    with pytest.raises(StageFailed, match="ended by itself"):
        trainer.run({}, lambda done, total: None)
    updated(store, policy, rollouts, advantages, logprob_tolerance=0.5)
    assert not trainer._folder.path.exists()


PIPELINE = textwrap.dedent("""
    import sys
    import time
    from stages.artifacts.commit import Request, materialise
    from stages.artifacts.store import open_store
    from stages.policy.settings import TrainerExecution
    from stages.policy.stage import prestart
    from stages.policy.trainer import client
    from stages.policy.warmstart import STAGE, WarmstartConfig
    from tests.builders import stored_tasks
    from tests.stages.policy.stored import tiny_policy

    execution = TrainerExecution(threads=1, device="cpu", processes=int(sys.argv[3]))
    prestart(execution)
    print(client._current[1]._process.pid, client._current[1]._folder.path, flush=True)
    store = open_store(sys.argv[1])
    inputs = {"policy": [tiny_policy(store)], "tasks": [stored_tasks(store)]}
    request = Request(STAGE, WarmstartConfig(steps=int(sys.argv[2]), tokens_per_step=64), execution, inputs, 0)
    materialise(store, request, progress=lambda shard, done, total: print("step", done, flush=True))
    print("done", flush=True)
    time.sleep(float(sys.argv[4]))
""")


NEXT = textwrap.dedent("""
    from stages.policy.settings import TrainerExecution
    from stages.policy.trainer import client

    print(client.trainer_for(TrainerExecution(threads=1, device="cpu"))._folder.path, flush=True)
""")


class Pipeline:
    """Another pipeline, which warm-starts a policy and prints its trainer, its progress, and ``done``."""

    def __init__(self, store: Path, steps: int, processes: int = 1, rest_s: float = 0, **environment: str):
        """``rest_s``: how long it goes on afterwards."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", PIPELINE, str(store), str(steps), str(processes), str(rest_s)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        pid, folder = self.until("").split(maxsplit=1)
        self.trainer, self.folder = int(pid), Path(folder)

    def until(self, beginning: str) -> str:
        """The first line from here on that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(beginning):
                return line.strip()
        raise AssertionError(f"ended without {beginning!r}")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.communicate(timeout=60)


def all_end(*process_ids: int) -> bool:
    return eventually(lambda: not any(map(is_running, process_ids)), within_s=90)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pipeline, Path]]:
    """A pipeline whose trainer has done its work, where no compiler can be found; and where it would be compiled."""
    folder = tmp_path_factory.mktemp("idle")
    tools = folder / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    built = folder / "built"
    pipeline = Pipeline(folder / "store", 2, rest_s=600, PATH=str(tools), TORCH_EXTENSIONS_DIR=str(built))
    pipeline.until("done")
    yield pipeline, built
    pipeline.kill()


def test_one_process_needs_no_compiler_and_compiles_nothing(idle: tuple[Pipeline, Path]) -> None:
    _, built = idle
    assert not built.exists()


def test_an_idle_trainer_ends_with_a_killed_pipeline_and_its_folder_goes_with_the_next_one(
    idle: tuple[Pipeline, Path],
) -> None:
    pipeline, _ = idle
    living = client.trainer_for(EXECUTION)
    assert is_running(pipeline.trainer)
    pipeline.kill()
    assert all_end(pipeline.trainer)
    assert (pipeline.folder / "log").exists()
    ended = subprocess.run([sys.executable, "-c", NEXT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not pipeline.folder.exists()
    assert not Path(ended.stdout.strip()).exists(), "that of the next one, which has ended in order"
    assert (living._folder.path / "log").exists()


def test_a_busy_trainer_ends_with_a_pipeline_that_is_killed(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "store", steps=20_000)
    pipeline.until("step")
    assert is_running(pipeline.trainer)
    pipeline.kill()
    assert all_end(pipeline.trainer)


def test_the_trainer_ends_with_a_pipeline_that_is_interrupted_before_it_was_used(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "store", steps=1)
    pipeline.kill(signal.SIGINT)
    assert all_end(pipeline.trainer)
    assert not pipeline.folder.exists()


@pytest.mark.slow
def test_several_processes_end_with_a_pipeline_that_is_killed(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "store", steps=1, processes=2, rest_s=600)
    pipeline.until("done")
    processes = [pipeline.trainer, *descendants(pipeline.trainer)]
    assert len(processes) == 4  # DeepSpeed's launcher, the one that it starts, and two ranks
    pipeline.kill()
    assert all_end(*processes)


def test_what_several_processes_lack_for_their_compiled_operation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"2 processes.*c\+\+ and ninja cannot be found"):
        prestart(TrainerExecution(processes=2, cpu_collectives="shm"))


def test_starting_early_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    client.stop()
    monkeypatch.setattr(client, "_command", lambda launch: ["sleep", "600"])  # a trainer that never reports
    prestart(EXECUTION)
    assert client._current is not None
    assert client._current[1].is_running
    client.stop()
