"""Reads stored rollouts back into the records that graders handle, one shard of the rollouts at a time."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from schemas.records import Episode, Step, Task, Trajectory

if TYPE_CHECKING:
    import polars as pl

    from stages.artifacts.stage import Inputs

_TEXT_COLUMNS = ("finish_reason", "messages", "response", "reasoning", "tool_calls")
_TOKEN_COLUMNS = ("prefix_length", "prompt_ids", "response_ids", "logprobs")


def read_episodes(inputs: "Inputs", shard: str, *, tokens: bool) -> Iterator[tuple[Task, Episode]]:
    """The episodes that one shard of the rollouts made, by id, each with its task.

    Their trajectories are in the order in which they started, each with the reward and the signals that the agent gave
    it, if any. An episode without any step has one empty trajectory called ``default``, so that it gets a row of its
    own.

    Args:
        tokens: whether steps carry token ids and logprobs; they are the bulk of the data.
    """
    import polars as pl

    episodes = (
        inputs.scan("rollouts", "episodes", shards=[shard])
        .select("episode_id", "task_id", "status", "artifacts")
        .sort("episode_id")
        .collect()
    )
    task_ids = episodes["task_id"].unique()
    tasks = inputs.scan("tasks", "tasks").filter(pl.col("task_id").is_in(task_ids.implode())).collect()
    task_by_id = {row["task_id"]: Task.from_row(row) for row in tasks.iter_rows(named=True)}
    trajectories = _trajectories(inputs.scan("rollouts", "steps", shards=[shard]), tokens=tokens)
    for row in episodes.iter_rows(named=True):
        task = task_by_id[row["task_id"]]
        episode = Episode(
            id=row["episode_id"],
            task=task,
            trajectories=trajectories.get(row["episode_id"]) or [Trajectory()],
            artifacts=json.loads(row["artifacts"]) if row["artifacts"] is not None else {},
            status=row["status"],
        )
        _put_what_the_agent_gave(episode)
        yield task, episode


def _put_what_the_agent_gave(episode: Episode) -> None:
    """Rewards and signals that the agent gave its trajectories, which the rollouts stage stores among the artifacts."""
    given = episode.artifacts.get("trajectories")
    for trajectory in episode.trajectories:
        mine = given.get(trajectory.name) if isinstance(given, dict) else None
        if isinstance(mine, dict):  # a user's agent may call an artifact of its own by that name
            trajectory.reward = mine.get("reward")
            trajectory.signals = mine.get("signals") or {}


def _trajectories(steps: "pl.LazyFrame", *, tokens: bool) -> dict[str, list[Trajectory]]:
    columns = _TEXT_COLUMNS + (_TOKEN_COLUMNS if tokens else ())
    frame = steps.select("episode_id", "trajectory", "step_index", "started_at", *columns).collect()
    order = frame.select("episode_id", "trajectory", "step_index", began=_started()).with_row_index("row")
    order = order.sort("episode_id", "began", "trajectory", "step_index")
    frame = frame[order["row"]]
    made: dict[str, list[Trajectory]] = {}
    for row in frame.iter_rows(named=True):
        of_episode = made.setdefault(row["episode_id"], [])
        if not of_episode or of_episode[-1].name != row["trajectory"]:
            of_episode.append(Trajectory(name=row["trajectory"]))
        of_episode[-1].steps.append(_step(row, tokens=tokens))
    return made


def _started() -> "pl.Expr":
    import polars as pl

    return pl.col("started_at").min().over("episode_id", "trajectory")


def _step(row: dict[str, Any], *, tokens: bool) -> Step:
    step = Step(
        messages=json.loads(row["messages"]),
        response=row["response"],
        reasoning=row["reasoning"],
        tool_calls=None if row["tool_calls"] is None else json.loads(row["tool_calls"]),
        finish_reason=row["finish_reason"],
    )
    if tokens:
        import numpy as np

        step.prefix_length = row["prefix_length"]
        for name, dtype in (("prompt_ids", np.int32), ("response_ids", np.int32), ("logprobs", np.float32)):
            setattr(step, name, None if row[name] is None else np.asarray(row[name], dtype=dtype))
    return step
