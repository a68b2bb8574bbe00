"""Refuses, before any work, a task runner that cannot work. Imports neither Prefect nor Ray nor Dask."""

import importlib.util
import os
import socket
from urllib.parse import urlsplit

from schemas.config import ConfigModel
from schemas.errors import ConfigError
from schemas.runner import RunnerConfig
from stages.artifacts.store import Store
from stages.rollouts.config import RolloutsConfig, RolloutsExecution
from stages.rollouts.role_policies import engines_of
from stages.rollouts.workers.settings import VllmConfig

_PACKAGES = {"ray": ("ray", "prefect_ray"), "dask": ("distributed", "prefect_dask")}
_SCHEMES = {"ray": ("ray", ""), "dask": ("tcp", "tls", "")}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_runner(store: Store, config: ConfigModel, execution: ConfigModel) -> None:
    """Returns if a stage's shards can be worked on where its settings say; only rollouts leave the choice.

    Raises:
        ConfigError: a package is missing, the cluster does not answer, or its processes would not see the store or
            Prefect, or would take each other's devices.
    """
    if not isinstance(execution, RolloutsExecution) or execution.runner.type == "threads":
        return
    runner = execution.runner
    missing = [name for name in _PACKAGES[runner.type] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"runner.type={runner.type} needs the package {missing[0]}, which is not installed",
            hint=f"pip install 'rollmill[{runner.type}]'",
        )
    if store.url.startswith("memory:"):
        raise ConfigError(
            f"the store {store.url} is seen by this process alone, and runner.type={runner.type} works in others",
            hint="use a folder that all of them see, or s3://…",
        )
    if runner.address is not None:
        _check_address(runner, runner.address)
    elif runner.workers > 1 and _starts_vllm(config, execution):
        raise ConfigError(
            f"each of the {runner.workers} processes of runner.type={runner.type} would start vLLM workers of its own "
            "on this machine, on the same devices",
            hint="leave runner out, as one process feeds all workers of a machine; or start vLLM servers and give "
            "their URLs as engine.workers",
        )


def _starts_vllm(config: ConfigModel, execution: RolloutsExecution) -> bool:
    return isinstance(config, RolloutsConfig) and any(
        isinstance(engine, VllmConfig) and vllm.starts_workers for engine, vllm in engines_of(config, execution)
    )


def _check_address(runner: RunnerConfig, address: str) -> None:
    if runner.type == "ray" and address == "auto":
        return
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or parts.scheme not in _SCHEMES[runner.type]:
        example = "ray://host:10001" if runner.type == "ray" else "tcp://host:8786"
        raise ConfigError(f"runner.address={address!r} is no address such as {example}")
    try:
        socket.create_connection((host, port), timeout=runner.connect_s).close()
    except OSError as error:
        raise ConfigError(f"no {runner.type} cluster answers at {address}: {error}") from error
    if host not in _LOOPBACK and not os.environ.get("PREFECT_API_URL"):
        raise ConfigError(
            f"the processes of the cluster at {address} cannot reach the Prefect server that this command would start",
            hint="run `prefect server start --host 0.0.0.0` and set PREFECT_API_URL to a URL that they can reach",
        )
