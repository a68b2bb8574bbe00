"""Runs the rollouts stage through the real commit protocol, over a stored tiny policy."""

from typing import Any

import polars as pl

from schemas.artifacts import Manifest
from stages.artifacts.commit import Outcome, Request, materialise
from stages.artifacts.scan import scan
from stages.artifacts.store import Store
from stages.rollouts.engines.base import PolicyFiles
from stages.rollouts.stage import STAGE
from tests.builders import given, task_rows

AGENTS = "tests/stages/rollouts/given_agents.py"


def stored_policy(store: Store, policy: PolicyFiles, *, leave_out: tuple[str, ...] = ()) -> Manifest:
    """The tiny policy as an artifact."""
    probe = [
        {"probe_id": n, "ids": ids.tolist(), "logprobs": logprobs.tolist()}
        for n, (ids, logprobs) in enumerate(zip(policy.probe.ids, policy.probe.logprobs, strict=True))
    ]
    files = {path.name: path.read_bytes() for path in policy.folder.iterdir() if path.name not in leave_out}
    return given(store, "policy", {"probe": probe}, parts={"checkpoint": files})


def stored_tasks(store: Store, n: int = 3, **columns: Any) -> Manifest:
    return given(store, "tasks", {"tasks": task_rows(n, **columns)})


def request(
    tasks: Manifest,
    policy: Manifest,
    config: dict[str, Any] | None = None,
    execution: dict[str, Any] | None = None,
    *,
    seed: int = 7,
    draw: int = 0,
) -> Request:
    """Rollouts of these tasks; short answers and small shards unless told otherwise."""
    execution_model = STAGE.Execution.model_validate({"shard_tasks": 2, "threads": 1, **(execution or {})})
    config_model = STAGE.Config.model_validate({"sampling": {"max_tokens": 8}, **(config or {})})
    resolved = STAGE.resolve(config_model, execution_model)
    return Request(STAGE, resolved, execution_model, {"tasks": [tasks], "policy": [policy]}, seed, draw)


def rolled_out(store: Store, asked: Request, **how: Any) -> Outcome:
    return materialise(store, asked, **how)


def frame(store: Store, manifest: Manifest, table: str) -> pl.DataFrame:
    return scan(manifest, table, store=store).collect()
