"""One real vLLM worker for all tests that ask one, as its start is what they cost.

A pytest plugin; ``tests/conftest.py`` loads it. The tests lie in files ``*_live.py``, which
share a process (``tests/suite.py``). Files are run by name; tests that end the worker are at the end of the last, ``test_vllm_live``.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stages.rollouts.engines.base import Generation, GenerationRequest, PolicyFiles
from stages.rollouts.engines.vllm import VllmEngine
from stages.rollouts.workers.command import vllm_python
from stages.rollouts.workers.local import LocalWorker
from stages.rollouts.workers.settings import VllmConfig, VllmExecution
from tests.stages.rollouts.processes import descendants, is_free, is_running

CONTEXT = 4096
"""Of the policies that the worker takes without a restart; long enough for answers that can be watched."""
# A policy that has learned nothing would write spaces where a JSON form allows them, and come to no end.
CONFIG = VllmConfig(
    type="vllm", args={"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
)
# At its first call vLLM would compile some of its sampling, which takes as long as the rest of its start.
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
"""Environment of workers that start quickly and take little memory."""
# The engine's process has the model itself, as with one GPU; another process would have vLLM to import, too.
_ONE_PROCESS_LESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="session")
def python() -> str:
    """The Python with vLLM; where there is none, the error says how to make it."""
    return vllm_python(VllmExecution())


@pytest.fixture(scope="session")
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture(scope="session")
def live_policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyFiles:
    """The policy with which the worker starts."""
    from tests.stages.rollouts.policies import make_policy

    return make_policy(tmp_path_factory.mktemp("policy"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def live(
    python: str, taken_port: int, live_policy: PolicyFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """An engine with one worker; each test loads the policy that it wants."""
    execution = VllmExecution(
        python=python, workers=1, port=taken_port, update="auto", lora_rank=8,
        env=SMALL | _ONE_PROCESS_LESS, args={"max_num_seqs": 64, "distributed_executor_backend": "uni"},
        log_dir=str(tmp_path_factory.mktemp("logs")), health_interval_s=0.5, backoff_s=0.5,
    )  # fmt: skip
    engine = VllmEngine(CONFIG, execution, probe_tolerance=1e-4)
    engine.load(live_policy)
    yield engine
    end(engine)


@pytest.fixture(scope="session")
def attached(live: VllmEngine) -> Callable[[PolicyFiles], dict[str, Any]]:
    """Loads a policy, and returns the settings of a stage that asks the worker for it."""

    def attach(policy: PolicyFiles) -> dict[str, Any]:
        live.load(policy)
        return {"vllm": {"workers": [url_of(live)]}, "probe_tolerance": 1e-4}

    return attach


def end(engine: VllmEngine) -> None:
    """Closes an engine: no process of its worker is left, and its port is free."""
    if engine.broken:
        return
    worker = worker_of(engine)
    family, port = family_of(worker), int(worker.server.place.rpartition(":")[2])
    engine.close()
    assert not any(map(is_running, family))
    assert is_free(port)


def family_of(worker: LocalWorker) -> list[int]:
    """The processes of a worker: first its guard; the server, and what that has started."""
    assert worker._process is not None
    guard = worker._process._guard.pid
    family = [guard, *descendants(guard)]
    assert len(family) >= 2
    return family


def worker_of(engine: VllmEngine) -> LocalWorker:
    (worker,) = engine.workers
    assert isinstance(worker, LocalWorker)
    return worker


def url_of(engine: VllmEngine) -> str:
    return f"http://{worker_of(engine).server.place}"


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 300, size=size).astype(np.int32) for size in random.integers(2, longest, size=count)]


def ask(engine: VllmEngine, requests: list[GenerationRequest]) -> list[Generation]:
    async def run() -> list[Generation]:
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(run())


def ids_of(generations: list[Generation]) -> list[list[int]]:
    return [generation.response_ids.tolist() for generation in generations]
