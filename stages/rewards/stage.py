"""The rewards stage: every stored trajectory gets a row that says how it was scored, or why it could not be.

A failed grader is a status and never a reward of 0. Rows are the same whenever graders are
deterministic, except for ``duration_s``: compare them without it.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from schemas.artifacts import Receipt, ShardPlan
from schemas.canonical import canonical_json
from schemas.config import ConfigModel, nearest, validated
from schemas.errors import ConfigError, InputError, NotFoundError, StageFailed
from schemas.loading import is_user_code
from schemas.records import Episode
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work
from stages.rewards.functions import source_version
from stages.rewards.graders import GRADERS
from stages.rewards.outcome import Outcome
from stages.rewards.worker import Item, WorkerSettings

if TYPE_CHECKING:
    import polars as pl

    from stages.rewards.rows import RewardRows


class RewardsConfig(ConfigModel):
    """What changes the rewards."""

    grader: str | None = Field(default=None, min_length=1)
    """exact, numeric, math, agent (what the agent itself gave), ``module:function`` or ``path/file.py:function``.
    None: the built-in grader that each task names (task data may not name functions: it is not trusted to choose
    code)."""
    grader_version: str | None = None
    """Filled in by ``resolve``: what its author stated, or a hash of its source."""
    params: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Parameters of the named grader; keyword arguments of a function."""
    tokens: bool = False
    """Whether graders see token ids and logprobs; without it these fields are None."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Time limit of one grading, seconds; past it the trajectory's status is ``timeout``."""
    memory_mb: int = Field(default=4096, ge=256)
    """Limit on a worker's address space, MiB (where the system enforces one)."""

    @field_validator("params")
    @classmethod
    def _complete(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        grader = info.data.get("grader")
        if grader is None and params:
            raise ValueError("they need a named grader")
        if grader not in GRADERS:
            return params
        return validated(GRADERS[grader], params, f"params of the grader {grader!r}").model_dump(mode="json")


class RewardsExecution(ConfigModel):
    """What only changes how the grading is done."""

    workers: int = Field(default_factory=lambda: max(1, min(16, os.cpu_count() or 1)), ge=1)
    """Worker processes."""
    chunk_size: int = Field(default=32, ge=1)
    """Episodes that a worker is handed at a time."""
    shard_episodes: int = Field(default=2048, ge=1)
    """Shards of the rollouts are taken together up to this many episodes."""
    max_failed_share: float = Field(default=0.2, ge=0, le=1)
    """The stage fails when more than this share of a shard's gradings end in error or timeout. Episodes that failed
    before they could be graded do not count: the rollouts stage has judged them."""


class RewardsStage(Stage[RewardsConfig, RewardsExecution]):
    """(tasks, rollouts) -> rewards, signals, step_rewards."""

    name = "rewards"
    kind = "rewards"
    version = 1
    stochastic = False
    inputs: ClassVar = {"tasks": InputSpec("tasks"), "rollouts": InputSpec("rollouts")}
    tables = ("rewards", "signals", "step_rewards")
    Config = RewardsConfig
    Execution = RewardsExecution

    def resolve(self, config: RewardsConfig, execution: RewardsExecution) -> RewardsConfig:
        return config.model_copy(update={"grader_version": _version(config.grader)})

    def check(self, inputs: Inputs, config: RewardsConfig, execution: RewardsExecution) -> None:
        import polars as pl

        from stages.rewards.pool import grading_pool

        if config.grader_version != _version(config.grader):
            raise ConfigError(
                f"the grader {config.grader!r} is no longer the version {config.grader_version!r} that was planned"
            )
        episodes = inputs.scan("rollouts", "episodes").select("task_id").unique()
        tasks = inputs.scan("tasks", "tasks").select("task_id", "grader", known=pl.lit(True), answered=_has_answer())
        used = episodes.join(tasks, on="task_id", how="left").sort("task_id").collect()
        if used.is_empty():
            raise InputError(f"rollouts {inputs.manifest('rollouts').ref} hold no episodes: there is nothing to grade")
        unknown = used.filter(pl.col("known").is_null())
        if not unknown.is_empty():
            raise InputError(
                f"{unknown.height} tasks of the rollouts are not among the tasks given, "
                f"the first is {unknown['task_id'][0]!r}",
                hint=f"they were made from {inputs.manifest('rollouts').inputs['tasks'][0]}",
            )
        graders = _task_graders(inputs, config)
        for name in graders:
            if name in GRADERS and GRADERS[name].needs_answer:
                asked = used if config.grader is not None else used.filter(pl.col("grader") == name)
                without = asked.filter(~pl.col("answered"))
                if not without.is_empty():
                    raise InputError(
                        f"the grader {name!r} compares with a reference answer, and {without.height} tasks have none, "
                        f"the first is {without['task_id'][0]!r}"
                    )
        with grading_pool(_settings(config, graders), execution.workers):
            pass  # a grader that cannot be loaded is refused before anything is written

    def plan(
        self, inputs: Inputs, config: RewardsConfig, execution: RewardsExecution, work: Work
    ) -> list[dict[str, Any]]:
        episodes: Counter[str] = Counter()  # by shard, which may have made several files
        for entry in inputs.manifest("rollouts").table_files("episodes"):
            episodes[entry.shard] += entry.rows or 0
        specs: list[dict[str, Any]] = []
        for shard, n in episodes.items():
            if not specs or specs[-1]["episodes"] + n > execution.shard_episodes:
                specs.append({"rollouts_shards": [], "episodes": 0})
            specs[-1]["rollouts_shards"].append(shard)
            specs[-1]["episodes"] += n
        return specs

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: RewardsConfig, execution: RewardsExecution, work: Work
    ) -> ShardOutput:
        from stages.rewards.episodes import read_episodes
        from stages.rewards.pool import graded, grading_pool
        from stages.rewards.rows import RewardRows

        graders = _task_graders(inputs, config)
        rows = RewardRows({name: _version(name) for name in graders})
        total, done = shard.spec["episodes"], 0
        with grading_pool(_settings(config, graders), execution.workers) as pool:
            for rollouts_shard in shard.spec["rollouts_shards"]:
                items = []
                for task, episode in read_episodes(inputs, rollouts_shard, tokens=config.tokens):
                    item = Item(
                        task, episode, config.grader or task.grader or "", tuple(t.name for t in episode.trajectories)
                    )
                    if _can_be_graded(episode):
                        items.append(item)
                    else:
                        message = f"the episode failed before it could be graded (status {episode.status})"
                        rows.add(item, [Outcome(name, "infra", explanation=message) for name in item.trajectories])
                        done += 1
                for item, outcomes in graded(pool, items, timeout_s=config.timeout_s, chunk_size=execution.chunk_size):
                    rows.add(item, outcomes)
                    done += 1
                    work.progress(min(done, total), total)
        _refuse_failures(rows, execution.max_failed_share)
        return ShardOutput(tables=rows.tables(), summary=rows.summary())

    def summarise(self, receipts: Iterable[Receipt]) -> dict[str, Any]:
        shards = [receipt.summary for receipt in receipts]
        counts = {
            name: sum(shard[name] for shard in shards)
            for name in ("n", "n_ok", "n_timeout", "n_error", "n_infra", "n_judged", "n_correct")
        }
        reward_sum = math.fsum(shard["reward_sum"] for shard in shards)
        verdicts: Counter[str] = Counter()
        for shard in shards:
            verdicts.update(shard["verdicts"])
        return {
            **counts,
            "mean_reward": reward_sum / counts["n_ok"] if counts["n_ok"] else None,
            "pass_rate": counts["n_correct"] / counts["n_judged"] if counts["n_judged"] else None,
            "verdicts": dict(sorted(verdicts.items())),
        }


def _version(grader: str | None) -> str:
    if grader is None:
        return ",".join(f"{name}={GRADERS[name].version}" for name in sorted(GRADERS))
    if is_user_code(grader):
        return source_version(grader)
    if grader not in GRADERS:
        raise NotFoundError(
            f"unknown grader {grader!r}: {nearest(grader, list(GRADERS))}",
            hint="a function of your own is named 'module:function' or 'path/file.py:function'",
        )
    return GRADERS[grader].version


def _task_graders(inputs: Inputs, config: RewardsConfig) -> tuple[str, ...]:
    """The graders that will be used: the config's, or those that the tasks name."""
    if config.grader is not None:
        return (config.grader,)
    named = inputs.scan("tasks", "tasks").select("task_id", "grader").sort("task_id").collect()
    for task_id, name in named.unique("grader", keep="first", maintain_order=True).iter_rows():
        if name is None:
            raise InputError(f"task {task_id!r} names no grader", hint="name one for all: rewards.grader=NAME")
        if name not in GRADERS:
            raise NotFoundError(
                f"task {task_id!r} asks for the grader {name!r}: {nearest(name, list(GRADERS))}",
                hint="task data may only name a built-in grader; name another for all: rewards.grader=NAME",
            )
    return tuple(sorted(named["grader"].unique()))


def _settings(config: RewardsConfig, graders: tuple[str, ...]) -> WorkerSettings:
    own = config.grader is not None and is_user_code(config.grader)
    return WorkerSettings(
        graders=graders,
        params=canonical_json(config.params),
        version=config.grader_version if own else None,
        memory_mb=config.memory_mb,
    )


def _has_answer() -> "pl.Expr":
    import polars as pl

    return pl.col("answer").is_not_null()


def _can_be_graded(episode: Episode) -> bool:
    """Not one that broke, nor one that ran out of time before the model said anything."""
    silent = not any(trajectory.steps for trajectory in episode.trajectories)
    return episode.status != "error" and not (episode.status == "timeout" and silent)


def _refuse_failures(rows: "RewardRows", limit: float) -> None:
    failed, gradings = rows.failures()
    if gradings and failed / gradings > limit:
        raise StageFailed(
            f"{failed} of {gradings} gradings failed, more than the limit of {limit:.0%}; "
            f"most often: {rows.commonest_failure()}",
            hint="mend the grader, raise rewards.timeout_s, or accept it with execution.rewards.max_failed_share",
        )


STAGE = RewardsStage()
