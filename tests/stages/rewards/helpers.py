"""Runs the rewards stage through the real commit protocol and reads its rows back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from schemas.artifacts import Manifest
from stages.artifacts.commit import Request, materialise
from stages.artifacts.store import Store
from stages.rewards.stage import STAGE, RewardsConfig, RewardsExecution
from tests.builders import episode_rows, given, step_rows, task_rows

GRADERS_FILE = Path(__file__).with_name("given_graders.py")


def rollouts_of(
    store: Store, responses: Mapping[str, str | None], *, n_tasks: int = 3, shards: int = 1, **episode: Any
) -> tuple[Manifest, Manifest]:
    """Tasks and rollouts in which the episode ``t001-0`` (task ``t001``) answered ``responses["t001-0"]``."""
    tasks = given(store, "tasks", {"tasks": task_rows(n_tasks)})
    episodes = [row for row in episode_rows(sorted({i[:4] for i in responses}), 9) if row["episode_id"] in responses]
    made = []
    for index in range(shards):
        mine = episodes[index::shards]
        steps = [row | {"response": responses[row["episode_id"]]} for row in step_rows([e["episode_id"] for e in mine])]
        made.append({"episodes": [row | episode for row in mine], "steps": steps})
    return tasks, given(store, "rollouts", *made, inputs={"tasks": [tasks]})


def request(tasks: Manifest, rollouts: Manifest, execution: Mapping[str, Any] | None = None, **config: Any) -> Request:
    """The rewards of these rollouts, resolved as a flow does it; two workers, any number of failures."""
    how = RewardsExecution.model_validate({"workers": 2, "max_failed_share": 1.0} | dict(execution or {}))
    return Request(STAGE, STAGE.resolve(RewardsConfig(**config), how), how, {"tasks": [tasks], "rollouts": [rollouts]})


def grade(
    store: Store, inputs: Sequence[Manifest], execution: Mapping[str, Any] | None = None, **config: Any
) -> tuple[Manifest, pl.DataFrame]:
    """The rewards artifact of (tasks, rollouts) and its rows, without the one column that is never the same twice."""
    tasks, rollouts = inputs
    manifest = materialise(store, request(tasks, rollouts, execution, **config)).manifest
    return manifest, rows(store, manifest)


def rows(store: Store, manifest: Manifest, table: str = "rewards") -> pl.DataFrame:
    """A table of a rewards artifact by id, without ``duration_s``."""
    frame = store.inputs({"it": [manifest]}).scan("it", table)
    return frame.drop("duration_s", strict=False).sort("episode_id", "trajectory").collect()


def by_episode(frame: pl.DataFrame, column: str) -> dict[str, Any]:
    """One column by episode."""
    return dict(frame.select("episode_id", column).iter_rows())


def own(function: str) -> str:
    """The name of a grader in ``given_graders.py``."""
    return f"{GRADERS_FILE}:{function}"
