"""How a vLLM server is started: which Python, on which devices, with which arguments."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, StageFailed
from stages.rollouts.checkpoint import model_config
from stages.rollouts.engines.base import PolicyFiles
from stages.rollouts.workers.settings import VllmConfig, VllmExecution

OLDEST = (0, 20)
RELOAD_METHOD = "rollmill_reload"
"""What a worker that we started has learnt from ``in_vllm/rollmill_worker.py``."""
_EXTENSION = Path(__file__).parent / "in_vllm"
_CPU_KV_CACHE_GIB = "2"
_ON_THE_CPU = {
    "enforce_eager": True,
    "max_num_seqs": 256,
    "enable_chunked_prefill": False,  # a seeded request whose prompt is cut ends 0.32: CPU generators have no offset
}
_NOT_INHERITED = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "VLLM_API_KEY"}  # the key is for given servers
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be started for."""
_ASK = """
import json, torch
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
print(json.dumps({
    "version": version(packages_distributions()["vllm"][0]),
    "gpus": torch.cuda.device_count(),
    "scale_out": Path(find_spec("vllm").origin, "../entrypoints/scale_out/token_in_token_out").resolve().is_dir(),
}))
"""


@dataclass(frozen=True)
class Slot:
    """Where a worker runs."""

    index: int
    devices: tuple[str, ...] | None
    """GPUs, as CUDA_VISIBLE_DEVICES names them; None: the CPU."""
    cores: tuple[int, ...] = ()
    """Of a worker on the CPU; none: all."""
    has_scale_out: bool = False
    """Whether this vLLM has a token API that is only there when it is told so."""


def vllm_python(execution: VllmExecution) -> str:
    """The Python with vLLM.

    Raises:
        ConfigError: the one that is set is not there.
    """
    given = execution.python or os.environ.get("ROLLMILL_VLLM_PYTHON")
    if given is not None:
        if not os.access(given, os.X_OK):
            raise ConfigError(f"there is no Python at {given}", hint="set execution.rollouts.vllm.python")
        return given
    beside = Path(".venv-vllm/bin/python")
    if not beside.exists():
        raise ConfigError(
            "there is no environment with vLLM",
            hint="make one with `make vllm`, or set execution.rollouts.vllm.python or ROLLMILL_VLLM_PYTHON to the "
            "Python of one, or execution.rollouts.vllm.workers to the URLs of running servers",
        )
    return str(beside.absolute())


def slots(execution: VllmExecution, python: str) -> list[Slot]:
    """A slot for each worker on this machine.

    Raises:
        ConfigError: there is no vLLM, it is too old, or there are not GPUs enough.
    """
    found = _interview(python)
    if is_too_old(found["version"]):
        raise ConfigError(f"vLLM {found['version']} in the environment of {python} is older than 0.20")
    size, wanted = execution.tensor_parallel, execution.workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [name for name in visible.split(",") if name] if visible else list(map(str, range(found["gpus"])))
    gpus = gpus[: found["gpus"]]
    if gpus:
        n = len(gpus) // size if wanted == "auto" else wanted
        assert isinstance(n, int)
        if n * size > len(gpus) or n == 0:
            raise ConfigError(
                f"{max(n, 1)} workers of {size} GPUs need {max(n, 1) * size}, and {len(gpus)} are visible",
                hint="change execution.rollouts.vllm.workers or tensor_parallel",
            )
        devices = [tuple(gpus[index * size : (index + 1) * size]) for index in range(n)]
        return [Slot(index, own, (), found["scale_out"]) for index, own in enumerate(devices)]
    n = 1 if wanted == "auto" else wanted
    assert isinstance(n, int)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // n if n > 1 else 0
    return [
        Slot(index, None, tuple(cores[index * share : (index + 1) * share]), found["scale_out"]) for index in range(n)
    ]


def adapter_rank(policy: PolicyFiles) -> int:
    """Of the policy's adapter; 0: it has none."""
    if policy.adapter is None:
        return 0
    rank: int = json.loads((policy.adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    return rank


def served_rank(policy: PolicyFiles, execution: VllmExecution) -> int:
    """Largest rank of adapters that a worker is started for; 0: for none."""
    wanted = max(adapter_rank(policy), execution.lora_rank or 0)
    return next(rank for rank in (0, *_RANKS) if rank >= wanted)


def command(
    policy: PolicyFiles, name: str, port: int, slot: Slot, config: VllmConfig, execution: VllmExecution, python: str
) -> tuple[list[str], dict[str, str]]:
    """The command line of a worker that serves the policy's checkpoint as ``name``, and its environment."""
    folder, rank = policy.folder, served_rank(policy, execution)
    args: dict[str, Any] = {
        "model": str(folder),
        "served_model_name": name,
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype_of(folder, config),
        "tensor_parallel_size": execution.tensor_parallel,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",  # the checkpoint's own defaults must not change how we sample
        "uvicorn_log_level": "warning",
        "worker_extension_cls": "rollmill_worker.RollmillWorker",
        **({"enable_scale_out": True} if slot.has_scale_out else {}),
        **({"enable_lora": True, "max_lora_rank": rank} if rank else {}),
        **(_ON_THE_CPU if slot.devices is None else {}),
        **execution.args,
        **config.args,
    }
    return [python, "-m", "vllm.entrypoints.openai.api_server", *_flags(args)], _environment(slot, execution)


def dtype_of(folder: Path, config: VllmConfig) -> str:
    """The number format, named: what vLLM makes of ``auto`` is not always what is stored."""
    if config.dtype != "auto":
        return config.dtype
    stored = model_config(folder)
    stored = {**stored, **stored.get("text_config", {})}
    return str(stored.get("dtype") or stored.get("torch_dtype") or "float32")


def is_too_old(version: str) -> bool:
    """Whether a version is known to be older than what is spoken here; builds without a number are let pass."""
    numbers = version.split(".")[:2]
    return len(numbers) == 2 and all(map(str.isdigit, numbers)) and (0, 0) < tuple(map(int, numbers)) < OLDEST


def _flags(args: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in args.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{word}" if value else f"--no-{word}")
        elif value is not None:
            flags += [f"--{word}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags


def _environment(slot: Slot, execution: VllmExecution) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    given |= {
        "PYTHONPATH": str(_EXTENSION),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # opens resetting the prefix cache and updating weights, on the loopback only
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    if slot.devices is not None:
        given["CUDA_VISIBLE_DEVICES"] = ",".join(slot.devices)
    else:
        given.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE_GIB)
        if slot.cores:
            given.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, slot.cores)))
    return given | execution.env


def _interview(python: str) -> dict[str, Any]:
    """Which vLLM that Python has, and how many GPUs it sees."""
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    asked = subprocess.run(
        [python, "-c", _ASK], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if asked.returncode:
        if "KeyError: 'vllm'" in asked.stderr or "No module named 'torch'" in asked.stderr:
            raise ConfigError(f"there is no vLLM in the environment of {python}", hint="`make vllm` makes one")
        raise StageFailed(f"{python} cannot tell which vLLM it has", hint=asked.stderr.strip()[-2000:])
    found: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    return found
