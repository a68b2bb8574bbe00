"""Serves the deployments of ``infra/prefect.yaml`` from one process: the same file that ``prefect deploy`` reads."""

import importlib
from pathlib import Path
from typing import Any

from prefect import Flow, serve
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.schedules import Cron

from flows.loading import read_yaml
from schemas.config import nearest
from schemas.errors import ConfigError, NotFoundError

FILE = Path(__file__).resolve().parents[1] / "infra" / "prefect.yaml"


def serve_deployments(only: list[str], limit: int, file: Path = FILE) -> None:
    """Registers the deployments and runs them until it is interrupted.

    Args:
        only: ``flow/name`` of each; empty: all.
        limit: flow runs at the same time.
    Raises:
        NotFoundError: a name is not in the file.
        ConfigError: no Prefect server is configured.
    """
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        raise ConfigError(
            "rollmill serve needs a Prefect server",
            hint="start one with 'prefect server start', and set PREFECT_API_URL (http://127.0.0.1:4200/api)",
        )
    deployments = {f"{each.flow_name}/{each.name}": each for each in read_deployments(file)}
    for name in only:
        if name not in deployments:
            raise NotFoundError(f"{file} has no deployment {name!r}", hint=nearest(name, list(deployments)))
    # Schedules keep their state when this process ends: another one may serve the same deployments.
    serve(*(deployments[name] for name in only or deployments), pause_on_shutdown=False, limit=limit)


def read_deployments(file: Path = FILE) -> list[RunnerDeployment]:
    """The deployments of a Prefect project file, ready to be served."""
    return [_deployment(entry) for entry in read_yaml(file)["deployments"]]


def _deployment(entry: dict[str, Any]) -> RunnerDeployment:
    path, _, name = entry["entrypoint"].partition(":")
    module = path.removesuffix(".py").replace("/", ".")
    flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
    return flow.to_deployment(
        name=entry["name"],
        description=entry.get("description"),
        parameters=entry.get("parameters"),
        schedules=[
            Cron(each["cron"], timezone=each["timezone"], slug=each["slug"], active=each["active"])
            for each in entry.get("schedules", [])
        ],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
