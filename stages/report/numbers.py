"""The numbers of a report, each from an artifact: which artifacts belong together, and what they say.

Joins are by id and artifacts are matched by their references; what is not known is None.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.artifacts import Manifest
from schemas.errors import InputError

if TYPE_CHECKING:
    import polars as pl

    from stages.artifacts.stage import Inputs

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Iteration:
    """Artifacts that belong together."""

    number: int
    rollouts: Manifest
    rewards: Manifest
    policy: Manifest | None
    """The policy that was made from these rollouts; None: none was given."""


@dataclass(frozen=True)
class Share:
    """A share of a number of trials with its 95% interval (Wilson)."""

    hits: int
    trials: int

    @property
    def value(self) -> float | None:
        """None where there was no trial."""
        return self.hits / self.trials if self.trials else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper bound; None where there was no trial."""
        if not self.trials:
            return None
        n, p = self.trials, self.hits / self.trials
        centre = (p + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
        half = _Z95 * math.sqrt(p * (1 - p) / n + _Z95**2 / (4 * n * n)) / (1 + _Z95**2 / n)
        return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Numbers:
    """What the trajectories of one iteration add up to."""

    n_tasks: int
    n_episodes: int
    n_trajectories: int
    n_scored: int
    """Trajectories whose grading succeeded."""
    mean_reward: float | None
    passed: Share
    """Of the trajectories that were judged right or wrong."""
    solved: Share
    """Tasks with at least one right attempt, of those with a judged one."""
    prompt_tokens: int | None
    response_tokens: int | None
    """None: not known of every episode."""


def linked(inputs: "Inputs", first: int) -> list[Iteration]:
    """The iterations, in the order in which their rollouts were given.

    Raises:
        InputError: rollouts without rewards or with two of them, or rewards of rollouts that were not given.
    """
    rollouts = inputs.manifests("rollouts")
    keys = {manifest.key for manifest in rollouts}
    rewards: dict[str, Manifest] = {}
    for manifest in inputs.manifests("rewards"):
        (scored,) = manifest.inputs["rollouts"]
        if scored.key not in keys:
            raise InputError(f"the rewards {manifest.ref} score {scored}, which is not among the rollouts given")
        if rewards.setdefault(scored.key, manifest).key != manifest.key:
            raise InputError(
                f"{rewards[scored.key].ref} and {manifest.ref} both score the rollouts {scored}",
                hint="make a report of each",
            )
    for manifest in rollouts:
        if manifest.key not in rewards:
            raise InputError(f"no rewards were given that score the rollouts {manifest.ref}")
    policies = {ref.key: policy for policy in inputs.manifests("policy") for ref in policy.inputs.get("rollouts", [])}
    return [
        Iteration(first + index, manifest, rewards[manifest.key], policies.get(manifest.key))
        for index, manifest in enumerate(rollouts)
    ]


def trajectories(inputs: "Inputs", iteration: Iteration) -> "pl.DataFrame":
    """One row a trajectory, sorted by id: its grading beside what is known of its episode (``response_tokens`` are
    those of the whole episode)."""
    import polars as pl

    episodes = inputs.scan("rollouts", "episodes", artifact=iteration.rollouts).select(
        "episode_id",
        "task_id",
        "rollout_index",
        "error_kind",
        "prompt_tokens",
        "response_tokens",
        episode_status=pl.col("status"),
    )
    rewards = inputs.scan("rewards", "rewards", artifact=iteration.rewards).select(
        "episode_id", "trajectory", "status", "reward", "is_correct", "verdict", "explanation"
    )
    return episodes.join(rewards, on="episode_id", how="inner").sort("episode_id", "trajectory").collect()


def numbers_of(frame: "pl.DataFrame") -> Numbers:
    """The sums over one iteration's ``trajectories``."""
    import polars as pl

    rewards = frame["reward"].drop_nulls()
    episodes = frame.unique("episode_id")
    judged = frame.filter(pl.col("is_correct").is_not_null())
    solved = judged.group_by("task_id").agg(pl.col("is_correct").any())["is_correct"]
    tokens = {
        name: None if episodes[name].null_count() else int(episodes[name].sum())
        for name in ("prompt_tokens", "response_tokens")
    }
    return Numbers(
        n_tasks=frame["task_id"].n_unique(),
        n_episodes=episodes.height,
        n_trajectories=frame.height,
        n_scored=len(rewards),
        mean_reward=math.fsum(rewards) / len(rewards) if len(rewards) else None,
        passed=Share(int(judged["is_correct"].sum()), judged.height),
        solved=Share(int(solved.sum()), len(solved)),
        **tokens,
    )


def task_scores(frame: "pl.DataFrame") -> "pl.DataFrame":
    """The table ``task_scores`` of one iteration's ``trajectories``."""
    import polars as pl

    grouped = (
        frame.group_by("task_id", "trajectory")
        .agg(
            n_attempts=pl.len().cast(pl.Int32),
            n_scored=pl.col("reward").count().cast(pl.Int32),
            best_reward=pl.col("reward").max(),
            mean_reward=pl.col("reward").drop_nulls(),
            pass_rate=pl.col("is_correct").drop_nulls(),
            mean_response_tokens=pl.col("response_tokens").drop_nulls(),
        )
        .sort("task_id", "trajectory")
    )
    return grouped.with_columns(
        pl.Series(name, [_mean(values) for values in grouped[name].to_list()], dtype=pl.Float64)
        for name in ("mean_reward", "pass_rate", "mean_response_tokens")
    )


def _mean(values: list[float]) -> float | None:
    """Exactly rounded sum over count, so that it does not depend on the number of threads."""
    return math.fsum(values) / len(values) if values else None
