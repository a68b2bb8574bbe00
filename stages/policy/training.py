"""Sends a training to the trainer and turns what it made into a policy artifact's tables and files.

The trainer keeps the last policy in memory: where that is the one to start from, nothing is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stages.artifacts.adapters import ADAPTER, base_of, policy_folders
from stages.artifacts.stage import FileOutput, Inputs, ShardOutput, Work
from stages.policy.checkpoint import CHECKPOINT, OPTIMIZER, OPTIMIZER_FILE, content_of, outputs
from stages.policy.metrics import metrics_table
from stages.policy.probe import probe_table
from stages.policy.sequences import Sequences
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
from stages.policy.trainer.client import trainer_for
from stages.policy.trainer.job import PROBE_LOGPROBS, Job, Result, Source, write_batch


@dataclass(frozen=True)
class Training:
    """Optimizer steps over sequences, and how they are taken."""

    sequences: Sequences
    steps: list[np.ndarray]
    """Numbers of the sequences of each optimizer step."""
    objective: Literal["policy_gradient", "cross_entropy"]
    loss: LossConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    dtype: Dtype
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    kl: KlConfig | None = None
    logprob_tolerance: float = 0.01
    gate: GateConfig | None = None
    save_optimizer: bool = True


def train_policy(
    stage: str,
    training: Training,
    inputs: Inputs,
    execution: TrainerExecution,
    work: Work,
    more_metrics: Mapping[str, float | None],
) -> ShardOutput:
    """The policy that a training makes of the input ``policy``.

    Args:
        stage: name of the stage, for the metrics.
        more_metrics: measurements beside the trainer's.
    """
    probe_ids = inputs.scan("policy", "probe").sort("probe_id").collect()["ids"].to_list()
    batch, out = work.scratch / "batch", work.scratch / "out"
    write_batch(batch, training.sequences, training.steps, probe_ids)
    trainer = trainer_for(execution)
    policy = inputs.manifest("policy")
    content = content_of(policy)
    against_reference = training.kl is not None and training.kl.against == "reference"
    job = Job(
        source=Source(content=content, checkpoint=None, optimizer=None),
        base=None if training.lora is None else base_of(policy) or policy.ref,
        lora=training.lora,
        reference=_source(inputs, "reference") if against_reference else None,
        batch=batch,
        out=out,
        objective=training.objective,
        loss=training.loss,
        kl=training.kl,
        optimizer=training.optimizer,
        schedule=training.schedule,
        dtype=training.dtype,
        zero_stage=execution.zero_stage,
        max_tokens_per_micro_batch=execution.max_tokens_per_micro_batch,
        gradient_checkpointing=execution.gradient_checkpointing,
        logprob_tolerance=training.logprob_tolerance,
        gate=training.gate,
        save_optimizer=training.save_optimizer,
    )
    if trainer.holds != (content, job.shape):
        source = _source(inputs, "policy")
        if training.lora is not None and source.adapter is None:  # what was stored is of other weights
            source = source.model_copy(update={"optimizer": None})
        job = job.model_copy(update={"source": source})
    result = Result.model_validate(trainer.run(job.model_dump(mode="json"), work.progress))
    trainer.holds = None if result.content is None else (result.content, job.shape)
    part = CHECKPOINT if training.lora is None else ADAPTER
    files = outputs(out / part, part)
    if training.save_optimizer:
        files += outputs(out / OPTIMIZER, OPTIMIZER)
    return ShardOutput(
        tables={
            "probe": probe_table(probe_ids, json.loads((out / PROBE_LOGPROBS).read_text())),
            "metrics": metrics_table(stage, {**result.metrics, **more_metrics}),
        },
        files=files,
        summary=result.metrics,
    )


def passed_on(stage: str, inputs: Inputs, metrics: Mapping[str, float | None]) -> ShardOutput:
    """The input policy as it is, where there was nothing to train on."""
    policy = inputs.manifest("policy")
    part = CHECKPOINT if base_of(policy) is None else ADAPTER
    files: list[FileOutput] = outputs(inputs.folder("policy", part), part)
    if policy.table_files(OPTIMIZER):
        files += outputs(inputs.folder("policy", OPTIMIZER), OPTIMIZER)
    probe = inputs.scan("policy", "probe").sort("probe_id").collect()
    return ShardOutput(
        tables={
            "probe": probe_table(probe["ids"].to_list(), probe["logprobs"].to_list()),
            "metrics": metrics_table(stage, metrics),
        },
        files=files,
        summary={"optimizer_steps": 0},
    )


def _source(inputs: Inputs, name: str) -> Source:
    manifest = inputs.manifest(name)
    has_optimizer = name == "policy" and bool(manifest.table_files(OPTIMIZER))
    checkpoint, adapter = policy_folders(inputs, name)
    return Source(
        content=content_of(manifest),
        checkpoint=checkpoint,
        adapter=adapter,
        optimizer=inputs.folder(name, OPTIMIZER) / OPTIMIZER_FILE if has_optimizer else None,
    )
