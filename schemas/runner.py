"""Where the shards of a stage are worked on."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config import ConfigModel


class RunnerConfig(ConfigModel):
    """The Prefect task runner that gets the shards. No result depends on it."""

    type: Literal["threads", "ray", "dask"] = "threads"
    """threads: of this process. ray, dask: processes, on this machine or others (extras ``ray`` and ``dask``)."""
    address: str | None = None
    """Of a running cluster, which is left running (Ray: ``ray://host:10001`` or ``auto``; Dask:
    ``tcp://host:8786``). None: one is started on this machine and ended with the command."""
    workers: int = Field(default=2, ge=1)
    """Processes of a cluster that is started here."""
    connect_s: float = Field(default=20.0, gt=0)
    """For a cluster that was given to answer (Ray, once it has, keeps to times of its own)."""

    @model_validator(mode="after")
    def _threads_have_no_address(self) -> "RunnerConfig":
        if self.type == "threads" and self.address is not None:
            raise ValueError("address is that of a cluster: set type to ray or dask")
        return self
