"""Serves the deployments of ``infra/prefect.yaml`` from one process: the same file that ``prefect deploy`` reads."""

import importlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import Flow, serve
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from pydantic import BaseModel, Field

from flows.loading import read_yaml
from schemas.config import ConfigModel, nearest, validated
from schemas.errors import ConfigError, NotFoundError

FILE = Path(__file__).resolve().parents[1] / "infra" / "prefect.yaml"


class Schedule(ConfigModel):
    """When a deployment runs by itself."""

    cron: str
    timezone: str
    """As in ``Europe/Zurich``."""
    slug: str
    """Its name within the deployment; by it the server's state is kept."""
    active: bool
    """False: it stays as it is at the server, off at first."""


class Deployment(ConfigModel):
    """A flow with parameters and schedules."""

    name: str
    description: str | None = None
    entrypoint: str = Field(pattern=r"^\w+(\.\w+)+$")
    """``module.function``; a flow has the name of its function."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    schedules: list[Schedule] = Field(default_factory=list)
    work_pool: dict[str, Any] | None = None
    """For ``prefect deploy``; what is served needs none."""

    @property
    def flow_name(self) -> str:
        return self.entrypoint.rpartition(".")[2]

    @property
    def flow(self) -> Flow[..., Any]:
        module, _, name = self.entrypoint.rpartition(".")
        flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
        return flow


class Project(BaseModel):
    """What ``rollmill serve`` reads of a Prefect project file."""

    deployments: list[Deployment]


def read_deployments(file: Path = FILE) -> dict[str, Deployment]:
    """The deployments of a Prefect project file by ``flow/name``.

    Raises:
        NotFoundError, ConfigError: there is no such file, or a setting of a deployment is unknown or malformed.
    """
    project = validated(Project, read_yaml(file), str(file))
    return {f"{each.flow_name}/{each.name}": each for each in project.deployments}


def serve_deployments(only: list[str], limit: int, file: Path = FILE) -> None:
    """Registers the deployments and runs them until the process is interrupted or terminated.

    Schedules keep their state: one that was switched on at the server stays on, and so do those that were added there
    by hand. At the end nothing is paused, as another process may serve the same deployments; flow runs at work are
    cancelled.

    Args:
        only: ``flow/name`` of each; empty: all.
        limit: flow runs at the same time.
    Raises:
        NotFoundError: a name is not in the file.
        ConfigError: no Prefect server is configured, or it does not answer.
    """
    known = read_deployments(file)
    for name in only:
        if name not in known:
            raise NotFoundError(f"{file} has no deployment {name!r}", hint=nearest(name, list(known)))
    url = PREFECT_API_URL.value()
    if not url:
        raise ConfigError(
            "rollmill serve needs a Prefect server",
            hint="start one with 'prefect server start', and set PREFECT_API_URL (http://127.0.0.1:4200/api)",
        )
    with get_client(sync_client=True) as client:
        fault = client.api_healthcheck()
        if fault is not None:
            raise ConfigError(f"the Prefect server at {url} does not answer: {fault}", hint="is PREFECT_API_URL right?")
        served = [_served(known[name], _deployed(name, client)) for name in only or known]
    # Prefect would leave flow runs "running" for ever at an interrupt; at a termination it ends them properly.
    signal.signal(signal.SIGINT, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    serve(*served, pause_on_shutdown=False, limit=limit)


def _deployed(name: str, client: SyncPrefectClient) -> list[DeploymentSchedule]:
    """The schedules that the server has for a deployment, which registering it replaces."""
    try:
        return client.read_deployment_by_name(name).schedules
    except ObjectNotFound:
        return []


def _served(deployment: Deployment, deployed: Sequence[DeploymentSchedule]) -> RunnerDeployment:
    switched_on = {each.slug for each in deployed if each.active}
    given = [
        DeploymentScheduleCreate(
            schedule=CronSchedule(cron=each.cron, timezone=each.timezone),
            slug=each.slug,
            active=each.active or each.slug in switched_on,
        )
        for each in deployment.schedules
    ]
    by_hand = [
        DeploymentScheduleCreate(schedule=each.schedule, active=each.active, parameters=each.parameters)
        for each in deployed
        if each.slug is None
    ]
    return RunnerDeployment.from_flow(
        deployment.flow,
        name=deployment.name,
        description=deployment.description,
        parameters=deployment.parameters,
        schedules=given + by_hand,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
