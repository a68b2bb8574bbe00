"""Runs: how they are named, begun, and continued by the same command."""

import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from schemas.artifacts import Ref, RunEnd, RunRecord
from schemas.canonical import canonical_hash
from schemas.names import checked_name
from stages.artifacts.code import code_version
from stages.artifacts.layout import new_nonce
from stages.artifacts.store import Store
from stages.rollouts.config import RolloutsExecution
from stages.rollouts.workers.settings import VllmExecution


def run_name(given: str | None, label: str, identity: dict[str, Any]) -> str:
    """The run's name: the one given, else ``label`` and a hash of the config, so that the same command continues it.

    Raises:
        ConfigError: the given name cannot be a folder of the store.
    """
    if given is not None:
        return checked_name(given, "run name")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(label).stem).strip("-._") or "run"
    return f"{stem[:100]}-{canonical_hash(identity)[:8]}"


def begin_run(store: Store, name: str, flow: str, identity: dict[str, Any]) -> RunRecord:
    """Creates the run's record, or finds the equal one that is there.

    Raises:
        ConfigError: a run of this name has another config; the message lists the differences.
    """
    return store.put_run(
        RunRecord(
            run=name,
            flow=flow,
            config=identity,
            created_at=datetime.now(UTC),
            code=code_version(),
            nonce=new_nonce(),
        )
    )


def has_finished(store: Store, name: str, flow: str, identity: dict[str, Any]) -> bool:
    """Whether nothing is left to do of this run.

    Raises:
        ConfigError: a run of this name has another config.
    """
    if name not in store.runs():
        return False
    begin_run(store, name, flow, identity)
    return store.run_end(name) is not None


def logs_beside(execution: RolloutsExecution, run: str) -> RolloutsExecution:
    """``execution`` with a folder of the run's own for the logs of its workers, where the user has named none."""
    folder = Path(os.environ.get("ROLLMILL_LOGS") or "logs") / run

    def beside(vllm: VllmExecution) -> VllmExecution:
        return vllm if vllm.log_dir is not None else vllm.model_copy(update={"log_dir": str(folder)})

    of_roles = {name: beside(vllm) for name, vllm in execution.role_vllm.items()}
    return execution.model_copy(update={"vllm": beside(execution.vllm), "role_vllm": of_roles})


def end_run(store: Store, name: str, iterations: int, report: Ref | None) -> RunEnd:
    """Records that nothing is left to do."""
    return store.put_run_end(
        RunEnd(run=name, iterations=iterations, report=report, finished_at=datetime.now(UTC), nonce=new_nonce())
    )
