"""Whole commands with real vLLM workers: how they end, nothing of the workers outlives them; what was made is kept."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

import rollmill as public
from stages.artifacts.adapters import base_of
from stages.artifacts.store import open_store
from stages.rollouts.workers.command import vllm_python
from stages.rollouts.workers.settings import VllmExecution
from tests.flows.background import background
from tests.flows.commands import command, rollmill_process
from tests.flows.trained import recipe
from tests.stages.rollouts.live import SMALL
from tests.stages.rollouts.processes import descendants, is_free, name_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture
def written(grader_file, tmp_path):
    """Writes the tiny recipe with vLLM as its engine, and some settings changed; returns the file."""

    def write(engine=None, **changed):
        vllm = {"type": "vllm", "python": vllm_python(VllmExecution()), "workers": 1, "env": SMALL, **(engine or {})}
        settings: dict[str, Any] = recipe(grader_file) | changed
        settings["rollouts"] = settings["rollouts"] | {"engine": vllm}
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(settings))
        return file

    return write


BROKEN = """
import rollmill

@rollmill.evaluator(version="1")
def broken(task, episode):
    raise RuntimeError("no")
"""
BUSY = """
import rollmill
from pathlib import Path

first = set()

@rollmill.rollout
async def busy(task, config):
    if len(first) < 4:
        first.add(task.id)
    while True:
        await config.chat([{"role": "user", "content": task.instruction}])
        if task.id in first or not Path("busy").exists():
            return
"""
MANY = {
    "rollouts": {"agent": "busy.py:busy", "n": 32, "batch": {"size": 64}, "sampling": {"max_tokens": 48}},
    "tasks": {"benchmark": "arithmetic", "split": "train", "limit": 64},
    "execution": {"rollouts": {"shard_tasks": 1, "threads": 1}, "rewards": {"workers": 1}},
    "iterations": 1,
}
"""Rollouts of many shards, of which all but the first four keep the workers busy while there is a file ``busy``."""
FEW = MANY | {
    "rollouts": {"agent": "busy.py:busy", "n": 4, "batch": {"size": 8}, "sampling": {"max_tokens": 24}},
    "tasks": {"benchmark": "arithmetic", "split": "train", "limit": 24},
}
"""The same of eight shards."""


@pytest.fixture
def busy(tmp_path):
    """That file; the agent lies beside it."""
    (tmp_path / "busy.py").write_text(BUSY)
    file = tmp_path / "busy"
    file.touch()
    return file


def n_shards(store):
    return len(list(Path(store).glob("artifacts/rollouts/*/receipts/*.json")))


def workers_of(pipeline):
    """The processes of a command's vLLM servers, and the servers' ports."""
    family = descendants(pipeline)
    servers = [words for words in map(str.split, map(name_of, family)) if "--port" in words and "-I" not in words]
    return family, [int(words[words.index("--port") + 1]) for words in servers]


def end_while_workers_generate(words, number, tmp_path):
    """Sends a command the signal when all but the busy shards are finished; nothing of it is left, nor a port taken."""
    with background(command(*words), tmp_path / "log", {}, tmp_path) as running:
        running.wait_until(lambda: n_shards(words[-1]) >= 3, timeout_s=400)
        _, ports = workers_of(running.process.pid)
        assert len(ports) == 1
        running.ended_by(number, timeout_s=60)
        assert "Traceback" not in running.output
    assert all(map(is_free, ports))
    assert n_shards(words[-1]) in (3, 4)


def test_an_adapter_is_trained_in_one_running_worker_also_after_a_command_that_was_killed(written, busy, tmp_path):
    store = tmp_path / "store"
    file = written(
        {"lora_rank": 8},
        **FEW | {"iterations": 3}, update={"optimizer": {"lr": 0.05}, "lora": {"rank": 4, "alpha": 16}},
    )  # fmt: skip
    words = ["train", file, "run=lora", "--store", store]
    end_while_workers_generate(words, signal.SIGKILL, tmp_path)
    busy.unlink()
    done = rollmill_process(*words, cwd=tmp_path, timeout_s=500)
    assert done.code == 0, done.text
    assert n_shards(store) == 3 * 8
    stored = open_store(str(store))
    policies = [stored.manifest(record.artifacts["policy"]) for record in stored.iterations("lora")]
    assert len({base_of(policy) for policy in policies}) == 1
    metrics = public.scan("lora", "metrics", store=stored).filter(stage="policy").collect()
    apart = metrics.filter(pl.col("name") == "sampler_trainer_logprob_diff_max")["value"].to_list()
    assert len(apart) == 3
    assert max(apart) < 1e-4
    _, log = sorted(tmp_path.rglob("vllm-*.log"), key=lambda file: file.name)  # of each command, one worker's
    assert len(re.findall("Starting vLLM server", log.read_text())) == 1
    assert len(re.findall("Loaded new LoRA adapter", log.read_text())) == 2
    ports = re.findall(r"--port[ =](\d+)|'port': (\d+)", log.read_text())
    assert ports
    assert all(is_free(int(a or b)) for a, b in ports)


@pytest.mark.full
def test_a_command_that_is_interrupted_while_its_workers_generate_leaves_nothing_and_goes_on(written, busy, tmp_path):
    store = tmp_path / "store"
    words = ["train", written(**MANY), "run=ended", "--store", store]
    end_while_workers_generate(words, signal.SIGINT, tmp_path)
    busy.unlink()
    done = rollmill_process(*words, cwd=tmp_path, timeout_s=500)
    assert done.code == 0, done.text
    assert n_shards(store) == 64


@pytest.mark.full
def test_a_command_that_fails_leaves_no_worker(written, tmp_path):
    grader = tmp_path / "broken.py"
    grader.write_text(BROKEN)
    file = written(rewards={"grader": f"{grader}:broken"})
    words = command("train", file, "run=bad", "--store", tmp_path / "store")
    with background(words, tmp_path / "log", {}, tmp_path) as running:
        running.wait_until(lambda: bool(workers_of(running.process.pid)[1]), timeout_s=400)
        _, ports = workers_of(running.process.pid)
        assert running.wait(timeout_s=400) == 1
        assert "Traceback" not in running.output
    assert all(map(is_free, ports))


@pytest.mark.full
def test_when_all_workers_are_gone_the_command_says_so_in_time_and_keeps_what_is_finished(written, busy, tmp_path):
    store, broken = tmp_path / "store", tmp_path / "python"
    real = vllm_python(VllmExecution())
    broken.write_text(f'#!/bin/sh\n[ -e {tmp_path}/gone ] && exit 3\nexec {real} "$@"\n')
    broken.chmod(0o755)
    settings = {"python": str(broken), "max_failures": 2, "backoff_s": 0.2, "health_interval_s": 0.2}
    file = written(settings, **MANY)
    words = ["train", file, "run=gone", "--store", store]
    with background(command(*words), tmp_path / "log", {}, tmp_path) as running:
        running.wait_until(lambda: n_shards(store) >= 3, timeout_s=400)
        (tmp_path / "gone").touch()
        for one in workers_of(running.process.pid)[0]:
            if "EngineCore" in name_of(one):
                os.kill(one, signal.SIGKILL)
        assert running.wait(timeout_s=200) == 1
        assert "all workers are gone" in running.output
        assert "Traceback" not in running.output
    assert n_shards(store) in (3, 4)
    (tmp_path / "gone").unlink()
    busy.unlink()
    done = rollmill_process(*words, cwd=tmp_path, timeout_s=500)
    assert done.code == 0, done.text
    assert n_shards(store) == 64
