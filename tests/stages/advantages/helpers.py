"""Runs the advantages stage through the real commit protocol on rewards given by task, and reads its rows back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from schemas.artifacts import Manifest
from stages.advantages.stage import STAGE, AdvantagesConfig, AdvantagesExecution
from stages.artifacts.commit import Request, materialise
from stages.artifacts.store import Store
from tests.builders import episode_rows, given, reward_rows, step_rows

Rewards = Mapping[str, Sequence[float | None]]


def scored(store: Store, rewards: Rewards, *, shuffle: int | None = None, **episode: Any) -> tuple[Manifest, Manifest]:
    """Rollouts and their rewards: attempt ``i`` at a task got the task's ``i``-th reward, or none (None)."""
    episodes = [
        row | episode
        for task, values in rewards.items()
        for row in (episode_rows([task], len(values)) if values else [])
    ]
    ids = [row["episode_id"] for row in episodes]
    rows = reward_rows(ids, [value for values in rewards.values() for value in values])
    if shuffle is not None:
        order = np.random.default_rng(shuffle).permutation(len(rows))
        rows = [rows[index] for index in order]
    rollouts = given(store, "rollouts", {"episodes": episodes, "steps": step_rows(ids)})
    return rollouts, given(store, "rewards", {"rewards": rows}, inputs={"rollouts": [rollouts]})


def request(inputs: tuple[Manifest, Manifest], **config: Any) -> Request:
    rollouts, rewards = inputs
    return Request(
        STAGE, AdvantagesConfig(**config), AdvantagesExecution(), {"rollouts": [rollouts], "rewards": [rewards]}
    )


def estimate(store: Store, inputs: tuple[Manifest, Manifest], **config: Any) -> tuple[Manifest, pl.DataFrame]:
    """The advantages artifact and its rows by id."""
    manifest = materialise(store, request(inputs, **config)).manifest
    return manifest, store.inputs({"it": [manifest]}).scan("it", "advantages").collect()


def column(frame: pl.DataFrame, name: str, task: str = "a") -> list[Any]:
    """A column of the attempts at one task, in the order of the attempts (fewer than ten)."""
    return frame.filter(pl.col("episode_id").str.starts_with(f"{task}-"))[name].to_list()
