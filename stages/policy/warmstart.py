"""Supervised start of a policy: instructions and their answers as chats, cross-entropy on the answers.

Uses the trainer, packing and loss of the update. The optimizer's state is not kept: the update that
follows has another objective and begins with its own.
"""

from typing import Any, ClassVar

from pydantic import Field, field_validator

from schemas.artifacts import ShardPlan
from schemas.config import ConfigModel
from schemas.errors import InputError
from stages.artifacts.adapters import base_of
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work
from stages.policy.settings import Dtype, LossConfig, OptimizerConfig, ScheduleConfig, TrainerExecution


class WarmstartConfig(ConfigModel):
    """How the policy is taught."""

    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    tokens_per_step: int = Field(default=4096, ge=1)
    """About how many tokens each is computed on, prompts included."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    schedule: ScheduleConfig = ScheduleConfig()
    dtype: Dtype = "float32"
    answer_forms: list[str] = Field(default=["{answer}"], min_length=1)
    """How answers are written; each task is taught in every form. With several the policy does not know which one is
    rewarded, which leaves something to learn from rewards."""
    system: str | None = None
    """System message of every chat. None: there is none."""

    @field_validator("answer_forms")
    @classmethod
    def _forms_have_the_answer(cls, forms: list[str]) -> list[str]:
        for form in forms:
            if "{answer}" not in form:
                raise ValueError(f"the form {form!r} lacks {{answer}}")
        return forms


class WarmstartStage(Stage[WarmstartConfig, TrainerExecution]):
    """A policy that has seen right answers."""

    name = "policy_warmstart"
    kind = "policy"
    version = 1
    stochastic = True
    inputs: ClassVar[dict[str, InputSpec]] = {"policy": InputSpec("policy"), "tasks": InputSpec("tasks")}
    tables = ("probe", "metrics")
    Config = WarmstartConfig
    Execution = TrainerExecution

    def check(self, inputs: Inputs, config: WarmstartConfig, execution: TrainerExecution) -> None:
        import polars as pl

        if base_of(inputs.manifest("policy")) is not None:
            raise InputError(
                f"{inputs.manifest('policy').ref} is an adapter, and a warm start trains all weights",
                hint="warm-start its base, or merge it with `rollmill policy export` and import that",
            )
        without = inputs.scan("tasks", "tasks").filter(pl.col("answer").is_null()).select("task_id").head(3).collect()
        if without.height:
            raise InputError(
                f"tasks without an answer cannot be taught: {', '.join(without['task_id'].to_list())}",
                hint="give tasks that all have an answer",
            )

    def plan(
        self, inputs: Inputs, config: WarmstartConfig, execution: TrainerExecution, work: Work
    ) -> list[dict[str, Any]]:
        return [{}]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: WarmstartConfig, execution: TrainerExecution, work: Work
    ) -> ShardOutput:
        from schemas.canonical import seed_from
        from stages.policy.chats import taught_chats
        from stages.policy.minibatches import by_tokens
        from stages.policy.training import Training, train_policy

        seed = seed_from(work.seed, work.draw)
        sequences = taught_chats(inputs, config.system, config.answer_forms)
        training = Training(
            sequences=sequences,
            steps=by_tokens(sequences.lengths_S, config.steps, config.tokens_per_step, seed),
            objective="cross_entropy",
            loss=LossConfig(),
            optimizer=config.optimizer,
            schedule=config.schedule,
            dtype=config.dtype,
            save_optimizer=False,
        )
        return train_policy(self.name, training, inputs, execution, work, {"examples": len(sequences.lengths_S)})


STAGE = WarmstartStage()
