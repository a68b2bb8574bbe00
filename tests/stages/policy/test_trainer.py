"""The trainer's process: warm or cold the same, its errors told, and gone when the pipeline is gone."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from schemas.artifacts import Manifest
from schemas.errors import ConfigError, InputError, StageFailed
from stages.artifacts.store import Store, open_store
from stages.policy.checkpoint import content_of
from stages.policy.settings import TrainerExecution
from stages.policy.stage import prestart
from stages.policy.trainer import client
from stages.policy.trainer.wire import is_alive
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

ROOT = Path(__file__).resolve().parents[3]


def chain(store: Store, *, cold: bool) -> list[Manifest]:
    """Two updates one after the other."""
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    advantages = advantages_of(store, rollouts)
    made = [policy]
    for _ in range(2):
        if cold:
            client.stop()
        made.append(updated(store, made[-1], rollouts, advantages, optimizer={"lr": 1e-3, "weight_decay": 0.1}))
    return made


def test_a_warm_trainer_and_a_cold_one_make_the_same_bytes(tmp_path: Path) -> None:
    warm = chain(open_store(tmp_path / "warm"), cold=False)
    assert client._current is not None
    assert client._current[1].holds is not None
    assert client._current[1].holds[0] == content_of(warm[-1])
    cold = chain(open_store(tmp_path / "cold"), cold=True)
    assert [contents_of(policy) for policy in warm] == [contents_of(policy) for policy in cold]
    assert len({content_of(policy) for policy in warm}) == 3


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
        client.stop() if reset else None
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
    wild = rollouts_of(store, policy, logprobs=[float("-inf")], response_ids=[9])
    with pytest.raises(StageFailed, match=r"gradient's norm is|the loss is"):
        updated(store, policy, wild, advantages_of(store, wild), loss={"eps_high": 1e30})
    after = updated(store, policy, rollouts, advantages)
    client.stop()
    assert contents_of(after) == contents_of(updated(store, policy, rollouts, advantages, logprob_tolerance=0.5))


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
    assert not trainer._folder.exists()


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
    print(client._current[1]._process.pid, flush=True)
    store = open_store(sys.argv[1])
    inputs = {"policy": [tiny_policy(store)], "tasks": [stored_tasks(store)]}
    request = Request(STAGE, WarmstartConfig(steps=int(sys.argv[2]), tokens_per_step=64), execution, inputs, 0)
    materialise(store, request, progress=lambda shard, done, total: print("step", done, flush=True))
    print("done", flush=True)
    time.sleep(float(sys.argv[4]))
""")


def pipeline(
    store: Path, steps: int, processes: int = 1, rest_s: float = 0, **environment: str
) -> "subprocess.Popen[str]":
    """Another pipeline, which warm-starts a policy and prints its trainer's process id, its progress, and ``done``.

    Args:
        rest_s: how long it goes on afterwards.
    """
    return subprocess.Popen(
        [sys.executable, "-c", PIPELINE, str(store), str(steps), str(processes), str(rest_s)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def lines_until(process: "subprocess.Popen[str]", beginning: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"ended without {beginning!r}: {lines}")


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


@pytest.mark.parametrize(("steps", "at"), [(20_000, "step"), (1, "done")], ids=["busy", "idle"])
def test_the_trainer_ends_with_a_pipeline_that_is_killed(tmp_path: Path, steps: int, at: str) -> None:
    process = pipeline(tmp_path / "store", steps, rest_s=600)
    trainer = int(lines_until(process, at)[0])
    assert is_alive(trainer)
    process.kill()
    process.wait()
    assert gone(trainer, within_s=5)


def test_the_trainer_ends_with_a_pipeline_that_is_interrupted_before_it_was_used(tmp_path: Path) -> None:
    process = pipeline(tmp_path / "store", steps=1)
    assert process.stdout is not None
    trainer = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    process.wait()
    assert gone(trainer, within_s=10)


@pytest.mark.slow
def test_several_processes_end_with_a_pipeline_that_is_killed(tmp_path: Path) -> None:
    process = pipeline(tmp_path / "store", steps=1, processes=2, rest_s=600)
    launcher = int(lines_until(process, "done")[0])
    processes = [launcher, *descendants(launcher)]
    assert len(processes) == 4  # DeepSpeed's launcher, the one that it starts, and two ranks
    process.kill()
    process.wait()
    assert all(gone(pid, within_s=15) for pid in processes)


def descendants(pid: int) -> list[int]:
    """Process ids of children and theirs."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def test_one_process_needs_no_compiler_and_compiles_nothing(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    built = tmp_path / "built"
    process = pipeline(tmp_path / "store", steps=2, PATH=str(tools), TORCH_EXTENSIONS_DIR=str(built))
    assert lines_until(process, "done")[-1] == "done"
    assert process.wait() == 0
    assert not built.exists()


def test_what_several_processes_lack_for_their_compiled_operation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"2 processes.*c\+\+ and ninja cannot be found"):
        prestart(TrainerExecution(processes=2, cpu_collectives="shm"))


def test_starting_early_returns_at_once() -> None:
    client.stop()
    began = time.perf_counter()
    prestart(EXECUTION)
    assert time.perf_counter() - began < 0.5
