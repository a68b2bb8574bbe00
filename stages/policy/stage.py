"""The update of a policy from rollouts and advantages.

What is trained on are the stored token ids and logprobs, never a text tokenised again; the denominator
of the loss is global over the step. The work itself is done by the trainer, a process that stays warm.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.artifacts import Manifest, ShardPlan
from schemas.config import ConfigModel
from schemas.errors import ConfigError, InputError
from stages.artifacts.adapters import check_base
from stages.artifacts.stage import Inputs, InputSpec, ShardOutput, Stage, Work
from stages.policy.lora import check_lora
from stages.policy.settings import (
    Dtype,
    GateConfig,
    KlConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainerExecution,
)


class PolicyConfig(ConfigModel):
    """How the policy is updated."""

    objective: Literal["policy_gradient", "cross_entropy"] = "policy_gradient"
    """What the advantages are made for: a clipped policy gradient, or imitation of the kept trajectories."""
    loss: LossConfig = LossConfig()
    kl: KlConfig | None = None
    """Penalty on the divergence from another policy. None: there is none."""
    epochs: int = Field(default=1, ge=1)
    """How often the rollouts are gone through."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps an epoch; a group is never divided between two."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    dtype: Dtype = "float32"
    """Of the weights and the computation. In bfloat16 the optimizer keeps float32 master weights."""
    lora: LoraConfig | None = None
    """An adapter is trained, and the policy that comes out is one. None: all weights are."""
    logprob_tolerance: float = Field(default=0.01, gt=0)
    """A token whose logprob differs by more between sampler and trainer counts as off, in the metrics and the gate."""
    gate: GateConfig | None = None
    """When the update is refused because sampler and trainer do not agree. None: never."""

    @model_validator(mode="after")
    def _clip_only_a_gradient(self) -> "PolicyConfig":
        if self.objective == "cross_entropy" and (self.loss.ratio_floor or self.loss.ratio_ceiling):
            raise ValueError("loss.ratio_floor and loss.ratio_ceiling have no meaning with objective cross_entropy")
        return self


class PolicyStage(Stage[PolicyConfig, TrainerExecution]):
    """One update: policy, rollouts and advantages become the next policy."""

    name = "policy"
    kind = "policy"
    version = 1
    stochastic = False
    inputs: ClassVar[dict[str, InputSpec]] = {
        "policy": InputSpec("policy"),
        "rollouts": InputSpec("rollouts"),
        "advantages": InputSpec("advantages"),
        "base": InputSpec("policy", optional=True),
        "reference": InputSpec("policy", optional=True),
    }
    tables = ("probe", "metrics")
    Config = PolicyConfig
    Execution = TrainerExecution

    def check(self, inputs: Inputs, config: PolicyConfig, execution: TrainerExecution) -> None:
        check_base(inputs)
        check_lora(inputs, config.lora)
        advantages = inputs.manifest("advantages")
        made_for = advantages.summary.get("objective")
        if made_for is not None and made_for != config.objective:
            raise ConfigError(
                f"{advantages.ref} was made for the objective {made_for}, and this update is set to {config.objective}",
                hint=f"set objective={made_for}, or compute advantages with another estimator",
            )
        computed_from = advantages.inputs.get("rollouts")
        rollouts = inputs.manifest("rollouts").ref
        if computed_from is not None and rollouts not in computed_from:
            raise InputError(
                f"{advantages.ref} was computed from {computed_from[0]}, not from the given {rollouts}",
                hint=f"give rollouts {computed_from[0]}",
            )
        sampled_by = inputs.manifest("rollouts").inputs.get("policy")
        policy = inputs.manifest("policy").ref
        if config.gate is not None and sampled_by is not None and policy not in sampled_by:
            raise ConfigError(
                f"the gate compares sampler and trainer under one policy: {rollouts} was sampled by {sampled_by[0]}, "
                f"and {policy} is to be updated, so what was learnt between the two would count as a difference",
                hint="leave gate out where rollouts are of an earlier policy; the metrics sampler_trainer_… are told",
            )
        needs_reference = config.kl is not None and config.kl.against == "reference"
        if needs_reference != bool(inputs.manifests("reference")):
            raise ConfigError(
                "the penalty kl.against=reference needs the input 'reference' (a policy)"
                if needs_reference
                else "the input 'reference' was given, and no penalty uses it (kl.against=reference does)"
            )

    def plan(
        self, inputs: Inputs, config: PolicyConfig, execution: TrainerExecution, work: Work
    ) -> list[dict[str, Any]]:
        return [{}]

    def work(
        self, shard: ShardPlan, inputs: Inputs, config: PolicyConfig, execution: TrainerExecution, work: Work
    ) -> ShardOutput:
        from stages.policy.minibatches import by_group
        from stages.policy.rows import training_rows
        from stages.policy.sequences import sequences_from_steps
        from stages.policy.training import Training, passed_on, train_policy

        against_sampler = config.kl is not None and config.kl.against == "sampling"
        rows = training_rows(
            inputs,
            needs_logprobs=config.objective == "policy_gradient" or against_sampler,
        )
        metrics: dict[str, float | None] = {
            **rows.counts,
            "reward": rows.reward_mean,
            "policy_lag": _lag(inputs.manifest("policy"), inputs.manifest("rollouts")),
        }
        if rows.steps.num_rows == 0:
            return passed_on(self.name, inputs, {**metrics, "optimizer_steps": 0, "tokens": 0})
        sequences = sequences_from_steps(rows.steps).with_sampled_tokens()
        if sequences.n_sampled == 0:
            return passed_on(self.name, inputs, {**metrics, "optimizer_steps": 0, "tokens": 0})
        training = Training(
            sequences=sequences,
            steps=by_group(rows.group_ids, sequences.groups_S, config.minibatches, config.epochs),
            objective=config.objective,
            loss=config.loss,
            kl=config.kl,
            optimizer=config.optimizer,
            schedule=config.schedule,
            dtype=config.dtype,
            lora=config.lora,
            logprob_tolerance=config.logprob_tolerance,
            gate=config.gate,
        )
        return train_policy(self.name, training, inputs, execution, work, metrics)


def _lag(policy: Manifest, rollouts: Manifest) -> int | None:
    """Updates between the policy that sampled and the one that is updated; None: it is neither this one nor the one
    before."""
    sampled_by = rollouts.inputs.get("policy", [])
    if policy.ref in sampled_by:
        return 0
    return 1 if set(policy.inputs.get("policy", [])) & set(sampled_by) else None


STAGE = PolicyStage()


def prestart(execution: TrainerExecution) -> None:
    """Starts the trainer's process now, so that its imports run while rollouts are sampled; returns at once."""
    from stages.policy.trainer.client import trainer_for

    trainer_for(execution)
