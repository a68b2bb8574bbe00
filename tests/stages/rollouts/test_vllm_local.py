"""Workers that are started on this machine, as the engine looks after them. The servers are stand-ins, which start in a
second; ``test_vllm_live`` has real ones."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import StageFailed
from stages.rollouts.engines.base import EngineFault, GenerationRequest, SamplingParams
from stages.rollouts.engines.vllm import VllmEngine
from stages.rollouts.workers.settings import VllmConfig, VllmExecution
from tests.stages.rollouts.live import ask, end, family_of, worker_of
from tests.stages.rollouts.processes import eventually, is_running
from tests.stages.rollouts.stand_in import CONTEXT, LOGPROB, answer_ids, uniform_policy
from tests.stages.rollouts.stand_in_python import BROKEN, SECONDS

ROOT = Path(__file__).resolve().parents[3]
CALLS = [GenerationRequest(np.array([5, 6, 7], np.int32), SamplingParams(max_tokens=6), seed) for seed in range(24)]


@pytest.fixture
def broken(tmp_path):
    """A file, and while it is there no server starts."""
    return tmp_path / "broken"


@pytest.fixture
def start(tmp_path, broken):
    """Starts an engine with one worker, with some settings changed."""
    python = tmp_path / "python"
    program = "tests.stages.rollouts.stand_in_python"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH="{ROOT}"\nexec "{sys.executable}" -m {program} "$@"\n')
    python.chmod(0o755)
    made: list[VllmEngine] = []

    def start(seconds=0.0, **settings):
        execution = VllmExecution(
            python=str(python), workers=1, log_dir=str(tmp_path / "logs"), health_interval_s=0.1, backoff_s=0.1,
            env={SECONDS: str(seconds), BROKEN: str(broken)}, **settings,
        )  # fmt: skip
        made.append(VllmEngine(VllmConfig(type="vllm"), execution, probe_tolerance=1e-4))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture
def policy(tmp_path):
    return uniform_policy(tmp_path / "policy")


def assert_answered(generations, shift=0.0):
    for call, generation in zip(CALLS, generations, strict=True):
        assert generation.response_ids.tolist() == answer_ids(call.seed, 6)
        assert generation.logprobs.tolist() == [np.float32(LOGPROB + shift)] * 6


def strike(family, number):
    for process_id in family:
        os.kill(process_id, number)


def ask_and_strike(engine, number):
    """What comes of the calls where a signal is sent to the worker's processes when it has answered one of them."""
    _, *family = family_of(worker_of(engine))

    async def run():
        asked = [asyncio.create_task(engine.generate(call)) for call in CALLS]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        strike(family, number)
        assert worker_of(engine).n_calls > 1
        return await asyncio.gather(*asked, return_exceptions=True)

    return family, asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_calls_outlive_a_worker_that_is_killed_or_stopped(start, policy, number):
    engine = start(seconds=0.2, max_in_flight=4, hang_timeout_s=2)
    with engine.serving(policy):
        process = worker_of(engine)._process
        family, found = ask_and_strike(engine, number)
    assert_answered(found)
    assert worker_of(engine)._process is not process
    assert not any(map(is_running, family))


def test_weights_change_in_the_running_worker_and_a_shape_by_a_restart(start, policy, tmp_path):
    moved = uniform_policy(tmp_path / "moved", 1, shift=-0.5)
    longer = uniform_policy(tmp_path / "longer", 2)
    shape = json.loads((longer.folder / "config.json").read_text())
    (longer.folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 2 * CONTEXT}))
    engine, processes = start(), []
    for current, shift in ((policy, 0.0), (moved, -0.5), (longer, 0.0)):
        with engine.serving(current):
            assert_answered(ask(engine, CALLS), shift)
        processes.append(worker_of(engine)._process)
    assert processes[0] is processes[1] is not processes[2]
    assert engine.context_length == 2 * CONTEXT


def test_what_cannot_start_fails_with_its_error_and_the_end_of_its_log(start, broken, policy):
    broken.touch()
    engine = start()
    with pytest.raises(StageFailed, match=r"has ended while it started \(exit code 3\)") as told:
        engine.load(policy)
    _, cause, *rest = str(told.value).splitlines()
    assert f"it said: ValueError: no memory for {policy.folder}" in cause
    assert rest[0].startswith("the end of its log")
    assert [line.strip() for line in rest[1:]] == [f"line {n}" for n in range(20, 50)]


def test_where_no_worker_starts_again_calls_say_so_and_later_ones_are_answered(start, broken, policy, monkeypatch):
    monkeypatch.setattr("stages.rollouts.engines.vllm._FAULT_HOLDS_S", 0.0)
    engine = start(seconds=0.2, max_in_flight=4, max_failures=2)
    with engine.serving(policy):
        broken.touch()
        _, found = ask_and_strike(engine, signal.SIGKILL)
    faults = [one for one in found if isinstance(one, EngineFault)]
    assert 0 < len(faults) < len(CALLS)
    assert all("all workers are gone" in str(fault) for fault in faults)
    assert "no memory for" in str(faults[0])
    broken.unlink()
    with engine.serving(policy):
        assert_answered(ask(engine, CALLS))


def test_an_engine_that_is_closed_leaves_no_process_and_no_port(start, policy):
    engine = start(seconds=60)
    with engine.serving(policy):

        async def run():
            async with engine.at_home():
                asked = [asyncio.create_task(engine.generate(call)) for call in CALLS]
                await asyncio.to_thread(eventually, lambda: worker_of(engine).n_calls > 1)
                await asyncio.to_thread(end, engine)
                return await asyncio.gather(*asked, return_exceptions=True)

        found = asyncio.run(run())
    assert all(isinstance(one, EngineFault) and "closed" in str(one) for one in found), found
