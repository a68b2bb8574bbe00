"""Which stored model calls an update trains on: rollouts joined with advantages, by id."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from schemas.errors import InputError
from stages.artifacts.stage import Inputs
from stages.policy.sequences import named

if TYPE_CHECKING:
    import polars as pl

ID = ["episode_id", "trajectory"]


@dataclass(frozen=True)
class TrainingRows:
    """The model calls of the trajectories to train on."""

    steps: pa.Table
    """As ``sequences_from_steps`` reads it."""
    group_ids: list[str]
    """By group number."""
    counts: dict[str, int]
    """Trajectories: in the advantages, and kept, which are those that are trained on."""
    reward_mean: float | None
    """Mean over every trajectory with a reward; None: there is none."""


def training_rows(inputs: Inputs, *, needs_logprobs: bool) -> TrainingRows:
    """Joins advantages and steps by (episode_id, trajectory).

    Raises:
        InputError: an advantage without its steps, or steps whose logprobs cannot be trained on.
    """
    import polars as pl

    advantages = inputs.scan("advantages", "advantages").collect()
    trained = (
        advantages.filter("kept")
        .select(*ID, "group_id", "advantage", "token_advantages")
        .sort(ID)
        .with_columns(
            trajectory_number=pl.int_range(pl.len(), dtype=pl.Int64),
            group_number=pl.col("group_id").rank("dense").cast(pl.Int64) - 1,
        )
    )
    columns = ["step_index", "prefix_length", "prompt_ids", "response_ids", "logprobs"]
    sampling = ["logprob_mode", "temperature", "top_p", "top_k"]
    steps = (
        inputs.scan("rollouts", "steps")
        .select(*ID, *columns, *sampling)
        .join(trained.lazy(), on=ID, how="inner")
        .sort("trajectory_number", "step_index")
        .collect()
    )
    _check_every_advantage_has_steps(trained, steps)
    _check_every_step_has_ids(steps)
    return TrainingRows(
        steps=_with_temperature(steps, needs_logprobs),
        group_ids=trained["group_id"].unique().sort().to_list(),
        counts={
            "trajectories": advantages.height,
            "trajectories_trained": trained.height,
        },
        reward_mean=_reward_mean(advantages),
    )


def _check_every_advantage_has_steps(trained: "pl.DataFrame", steps: "pl.DataFrame") -> None:
    missing = trained.join(steps.select(ID), on=ID, how="anti").select(ID)
    if missing.height:
        raise InputError(
            f"the advantages name trajectories that the rollouts do not have: {named(missing.to_arrow())}",
            hint="give the rollouts that the advantages were computed from",
        )
    empty = trained.filter(trained["advantage"].is_null() & trained["token_advantages"].is_null()).select(ID)
    if empty.height:
        raise InputError(f"the advantages keep trajectories without an advantage: {named(empty.to_arrow())}")


def _check_every_step_has_ids(steps: "pl.DataFrame") -> None:
    unknown = steps.filter(steps["prefix_length"].is_null()).select(ID)
    if unknown.height:
        raise InputError(
            f"rollouts that cannot be trained on: {named(unknown.to_arrow())} were answered by an endpoint, which "
            "gives no token ids and no logprobs",
            hint="sample with a policy of the store: an engine of another type than endpoint",
        )


def _with_temperature(steps: "pl.DataFrame", needs_logprobs: bool) -> pa.Table:
    """The steps with ``temperature`` as what the trainer's logits must be divided by: 1 for raw logprobs."""
    import polars as pl

    processed = pl.col("logprob_mode") == "processed"
    temperature = pl.lit(1.0)
    if needs_logprobs:
        temperature = pl.when(processed).then("temperature").otherwise(1.0)
        problems = {
            "have no logprobs": pl.col("logprobs").is_null() | pl.col("logprob_mode").is_null(),
            "were kept to a JSON schema, which says what could be sampled": pl.col("logprob_mode") == "constrained",
            "were sampled greedily and have processed logprobs": processed & (pl.col("temperature") <= 0),
            "have processed logprobs at a temperature that is not known": processed & pl.col("temperature").is_null(),
            "have processed logprobs of a distribution cut by top_p": processed
            & (pl.col("top_p").is_null() | (pl.col("top_p") < 1)),
            "have processed logprobs of a distribution cut by top_k": processed & (pl.col("top_k") > 0),
        }
        for what, rows in problems.items():
            wrong = steps.filter(rows).select(ID)
            if wrong.height:
                raise InputError(
                    f"rollouts that cannot be trained on: {named(wrong.to_arrow())} {what}",
                    hint="let the engine store raw logprobs, or train with objective=cross_entropy",
                )
    return steps.with_columns(temperature=temperature).to_arrow()


def _reward_mean(advantages: "pl.DataFrame") -> float | None:
    """From the groups' means and sizes, so that rewards need not be read."""
    import polars as pl

    groups = advantages.filter(pl.col("group_mean").is_not_null()).unique("group_id")
    n_rewards = int(groups["group_size"].sum())
    total = float(groups.select((pl.col("group_mean") * pl.col("group_size")).sum()).item())
    return total / n_rewards if n_rewards else None
