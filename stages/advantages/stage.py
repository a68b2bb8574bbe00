"""The advantages stage: (rollouts, rewards) -> one row a trajectory, byte-identical for identical input.

Rows whose reward is not known take no part in any statistic. Nothing is left out of the table:
what is not trained on says why in ``drop_reason``.
"""

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from schemas.artifacts import ShardPlan
from schemas.config import ConfigModel, nearest, validated
from schemas.errors import InputError, NotFoundError
from stages.advantages.estimators import ESTIMATORS, Estimator
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work

if TYPE_CHECKING:
    import polars as pl

_CUT_SHORT = ("truncated", "max_turns", "timeout")


class AdvantagesConfig(ConfigModel):
    """What changes the advantages."""

    estimator: str = "grpo"
    """grpo, rloo, reinforce or rejection."""
    params: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Parameters of the estimator."""
    drop_flat_groups: bool = True
    """Whether groups of one and groups whose rewards are all equal are left out of training, where the estimator
    compares within groups. Their advantages are exactly 0 either way: kept, they count in the loss's denominator."""
    trajectories: list[str] | None = Field(default=None, min_length=1)
    """Names of the trajectories that are trained on, where an agent has several roles; ``*`` stands for any characters,
    as in ``solver-*``. The others are left out, and say so. None: all."""
    truncated: Literal["keep", "drop"] = "keep"
    """Whether episodes that were cut short (status truncated, max_turns or timeout) are trained on. They count in
    their group's statistics either way."""

    @field_validator("estimator")
    @classmethod
    def _known(cls, estimator: str) -> str:
        if estimator not in ESTIMATORS:
            raise NotFoundError(f"unknown estimator {estimator!r}: {nearest(estimator, list(ESTIMATORS))}")
        return estimator

    @field_validator("params")
    @classmethod
    def _complete(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("estimator")
        if name is None:
            return params
        return validated(ESTIMATORS[name], params, f"params of the estimator {name!r}").model_dump(mode="json")


class AdvantagesExecution(ConfigModel):
    """Nothing to set: the work is one shard of a few seconds at most."""


class AdvantagesStage(Stage[AdvantagesConfig, AdvantagesExecution]):
    """One shard: some baselines need the whole batch, and a row is small (a million: 2 s, 0.5 GB)."""

    name = "advantages"
    kind = "advantages"
    version = 1
    stochastic = False
    inputs: ClassVar = {"rollouts": InputSpec("rollouts"), "rewards": InputSpec("rewards")}
    tables = ("advantages",)
    Config = AdvantagesConfig
    Execution = AdvantagesExecution

    def check(self, inputs: Inputs, config: AdvantagesConfig, execution: AdvantagesExecution) -> None:
        rollouts, rewards = inputs.manifest("rollouts"), inputs.manifest("rewards")
        scored = rewards.inputs.get("rollouts", [])
        if [ref.digest for ref in scored] != [rollouts.digest]:
            raise InputError(
                f"the rewards {rewards.ref} score other rollouts ({', '.join(map(str, scored))}) than {rollouts.ref}"
            )

    def plan(
        self, inputs: Inputs, config: AdvantagesConfig, execution: AdvantagesExecution, work: Work
    ) -> list[dict[str, Any]]:
        return [{}]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: AdvantagesConfig, execution: AdvantagesExecution, work: Work
    ) -> ShardOutput:
        from stages.artifacts.parquet import table_from_frame

        estimator = ESTIMATORS[config.estimator](**config.params)
        rows = _advantages(inputs, estimator, config)
        return ShardOutput({"advantages": table_from_frame("advantages", rows)}, summary=_summary(rows, config))


def _advantages(inputs: Inputs, estimator: Estimator, config: AdvantagesConfig) -> "pl.DataFrame":
    """The rows of the table ``advantages``, sorted by id."""
    import polars as pl

    from stages.advantages.estimators.base import Samples
    from stages.advantages.groups import ID, with_group_ids, with_statistics

    episodes = inputs.scan("rollouts", "episodes").select("episode_id", "task_id", episode_status="status")
    rewards = inputs.scan("rewards", "rewards").select(*ID, "reward")
    joined = rewards.join(episodes, on="episode_id", how="left").collect()
    strays = joined.filter(pl.col("task_id").is_null())["episode_id"]
    if not strays.is_empty():
        raise InputError(f"{len(strays)} rewards are of no episode of the rollouts, the first is of {strays[0]!r}")
    frame = with_group_ids(joined).sort("group_id", *ID)
    known = with_statistics(frame.filter(pl.col("reward").is_not_null()))
    estimated = estimator.estimate(Samples(known, inputs.scan))
    estimated = estimated.with_columns(
        pl.lit(None, dtype=dtype).alias(name)
        for name, dtype in (("drop_reason", pl.String), ("token_advantages", pl.List(pl.Float32)))
        if name not in estimated.columns
    )
    flat = pl.col("is_flat") if estimator.compares_within_groups else pl.lit(False)
    flat_reason = pl.when(pl.col("group_size") == 1).then(pl.lit("group_of_one")).otherwise(pl.lit("zero_variance"))
    others = _sampled_by_others(inputs)
    if others is not None:
        estimated = estimated.join(others.collect(), on=ID, how="left", maintain_order="left")
    by_another = pl.col("by_another").fill_null(False) if others is not None else pl.lit(False)
    cut_short = pl.col("episode_status").is_in(_CUT_SHORT) & (config.truncated == "drop")
    estimated = estimated.with_columns(
        advantage=pl.when(flat).then(0.0).otherwise("advantage"),
        drop_reason=pl.when(~_is_trained(config.trajectories))
        .then(pl.lit("not_trained"))
        .when(by_another)
        .then(pl.lit("other_policy"))
        .when(cut_short)
        .then(pl.lit("truncated"))
        .when(flat & config.drop_flat_groups)
        .then(flat_reason)
        .otherwise("drop_reason"),
    )
    return _completed(frame, estimated)


def _sampled_by_others(inputs: Inputs) -> "pl.LazyFrame | None":
    """The trajectories that another policy than the stage's own has sampled, as ``by_another``; None: there can be
    none."""
    import polars as pl

    from stages.advantages.groups import ID

    rollouts = inputs.manifest("rollouts")
    if not rollouts.inputs.get("role_policies"):
        return None
    (own,) = rollouts.inputs["policy"]
    steps = inputs.scan("rollouts", "steps").select(*ID, "policy_id")
    return steps.group_by(ID).agg(by_another=(pl.col("policy_id") != own.key).any()).filter("by_another")


def _is_trained(patterns: list[str] | None) -> "pl.Expr":
    import polars as pl

    if patterns is None:
        return pl.lit(True)
    whole = "|".join(".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns)
    return pl.col("trajectory").str.contains(f"(?s)^(?:{whole})$")


def _completed(frame: "pl.DataFrame", estimated: "pl.DataFrame") -> "pl.DataFrame":
    """The estimated rows and those whose reward is not known, with the columns of the table."""
    import polars as pl

    from schemas.tables import TABLES
    from stages.advantages.groups import ID

    group = ["group_mean", "group_std", "group_size"]
    statistics = estimated.select("group_id", *group).unique("group_id")
    unknown = frame.filter(pl.col("reward").is_null()).join(statistics, on="group_id", how="left")
    unknown = unknown.with_columns(pl.col("group_size").fill_null(0), drop_reason=pl.lit("no_reward"))
    rows = pl.concat([estimated, unknown], how="diagonal").with_columns(kept=pl.col("drop_reason").is_null())
    wrong = rows.filter(pl.col("reward").is_not_null() & ~pl.col("advantage").is_finite().fill_null(False))
    if not wrong.is_empty() or rows.height != frame.height:
        raise ValueError(f"{wrong.height} of {rows.height} advantages (of {frame.height} rows) are not finite")
    return rows.select(TABLES["advantages"].schema.names).sort(ID)


def _summary(rows: "pl.DataFrame", config: AdvantagesConfig) -> dict[str, Any]:
    import polars as pl

    kept = rows.filter("kept")
    groups = rows.unique("group_id")
    return {
        "estimator": config.estimator,
        "objective": ESTIMATORS[config.estimator].objective,
        "n": rows.height,
        "n_kept": kept.height,
        "dropped": dict(sorted(Counter(rows["drop_reason"].drop_nulls()).items())),
        "n_groups": groups.height,
        "n_groups_kept": kept["group_id"].n_unique(),
        "n_groups_of_one": groups.filter(pl.col("group_size") == 1).height,
        "n_groups_zero_variance": groups.filter((pl.col("group_size") > 1) & (pl.col("group_std") == 0)).height,
        "n_groups_without_reward": groups.filter(pl.col("group_size") == 0).height,
    }


STAGE = AdvantagesStage()
