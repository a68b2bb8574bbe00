"""Engines by name. One of each kind and settings lives in a process and stays warm between uses."""

import atexit
import threading
from collections.abc import Callable

from schemas.canonical import canonical_hash
from stages.rollouts.config import EngineConfig, RolloutsExecution, ScriptedConfig, TransformersConfig
from stages.rollouts.engines.base import Engine
from stages.rollouts.workers.settings import VllmConfig


def _transformers(config: TransformersConfig, execution: RolloutsExecution) -> Engine:
    from stages.rollouts.engines.transformers import TransformersEngine

    return TransformersEngine(
        dtype=config.dtype,
        device=execution.device,
        threads=execution.threads,
        max_batch=execution.max_batch,
        probe_tolerance=execution.probe_tolerance,
    )


def _scripted(config: ScriptedConfig, execution: RolloutsExecution) -> Engine:
    from stages.rollouts.engines.scripted import ScriptedEngine, drawn_ids, replies_by_seed

    return ScriptedEngine(replies_by_seed(config.replies) if config.replies else drawn_ids(config.n_tokens))


def _vllm(config: VllmConfig, execution: RolloutsExecution) -> Engine:
    from stages.rollouts.engines.vllm import VllmEngine

    return VllmEngine(config, execution.vllm, probe_tolerance=execution.probe_tolerance)


ENGINES: dict[str, Callable[..., Engine]] = {"transformers": _transformers, "scripted": _scripted, "vllm": _vllm}
_RELEVANT: dict[str, set[str]] = {
    "transformers": {"max_batch", "device", "threads", "probe_tolerance"},
    "scripted": set(),
    "vllm": {"vllm", "probe_tolerance"},
}
"""Settings of the execution with which an engine is started; with others, it is another one."""

_RUNNING: dict[str, Engine] = {}
_GATE = threading.Lock()


def engine_for(config: EngineConfig, execution: RolloutsExecution, role: str = "") -> Engine:
    """The engine of this process for these settings, started where there is none.

    Args:
        role: a role with a policy of its own has an engine of its own, as one holds one policy at a time.
    """
    key = canonical_hash([config, execution.model_dump(include=_RELEVANT[config.type]), role])
    with _GATE:
        if key in _RUNNING and _RUNNING[key].broken:
            _RUNNING.pop(key).close()
        if key not in _RUNNING:
            _RUNNING[key] = ENGINES[config.type](config, execution)
        return _RUNNING[key]


def close_engines() -> None:
    """Ends all engines of this process; the next use starts a new one."""
    with _GATE:
        while _RUNNING:
            _RUNNING.popitem()[1].close()


atexit.register(close_engines)
