"""What the trainer is asked to do, as it travels to it: settings, and paths of local files.

The trainer needs no store: its inputs lie in files, its results are written to a folder.
"""

import json
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from schemas.artifacts import Ref
from schemas.config import ConfigModel
from stages.policy.sequences import Sequences
from stages.policy.settings import Dtype, GateConfig, KlConfig, LoraConfig, LossConfig, OptimizerConfig, ScheduleConfig

SEQUENCES, STEPS, PROBE_IDS = "sequences.safetensors", "steps.safetensors", "probe.json"
PROBE_LOGPROBS = "probe_logprobs.json"


class Source(ConfigModel):
    """The policy to start from."""

    content: str
    """Hash of its weights and optimizer files: a trainer that holds them need not read them."""
    checkpoint: Path | None
    """Folder; None: the trainer holds it. Of an adapter, its base's."""
    adapter: Path | None = None
    """Folder; None: the policy has weights of its own."""
    optimizer: Path | None
    """File; None: the trainer holds it, or there is none."""


class Job(ConfigModel):
    """One training: optimizer steps over given sequences."""

    source: Source
    base: Ref | None = None
    """To which the adapter that is trained belongs; None where ``lora`` is."""
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    reference: Source | None = None
    """The policy that the penalty measures against; None: none is needed."""
    batch: Path
    """Folder that ``write_batch`` filled."""
    out: Path
    """Folder for the results."""
    objective: Literal["policy_gradient", "cross_entropy"]
    loss: LossConfig
    kl: KlConfig | None = None
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    dtype: Dtype
    zero_stage: int = Field(ge=0, le=3)
    max_tokens_per_micro_batch: int
    gradient_checkpointing: bool
    logprob_tolerance: float
    gate: GateConfig | None = None
    save_optimizer: bool = True

    @property
    def effective_zero_stage(self) -> int:
        """DeepSpeed keeps float32 master weights from stage 1 on."""
        return max(1, self.zero_stage) if self.dtype == "bfloat16" else self.zero_stage

    @property
    def shape(self) -> tuple[str, int, bool, float | None, str | None]:
        """What a learner is built for; a job of another shape needs another learner."""
        stage = self.effective_zero_stage
        # with partitions DeepSpeed clips, and reads the limit once; without, the learner clips by itself
        limit = self.optimizer.max_grad_norm if stage > 0 else None
        trained = None if self.lora is None else self.lora.model_dump_json()
        return self.dtype, stage, self.gradient_checkpointing, limit, trained


class Result(ConfigModel):
    """What a training reports; the weights lie in the job's folder."""

    metrics: dict[str, float]
    content: str | None
    """Hash of the weights and optimizer files that were written and that the trainer now holds; None: it holds none,
    since its optimizer state was not written."""


def write_batch(folder: Path, sequences: Sequences, steps: list[np.ndarray], probe_ids: list[list[int]]) -> None:
    """Fills a folder with what the steps are computed on.

    Args:
        steps: numbers of the sequences of each optimizer step.
    """
    from safetensors.numpy import save_file

    folder.mkdir()
    sequences.save(folder / SEQUENCES)
    lengths = np.array([len(step) for step in steps], dtype=np.int64)
    save_file({"sequences": np.concatenate(steps).astype(np.int64), "lengths": lengths}, folder / STEPS)
    (folder / PROBE_IDS).write_text(json.dumps(probe_ids))


def read_batch(folder: Path) -> tuple[Sequences, list[np.ndarray], list[list[int]]]:
    from safetensors.numpy import load_file

    stored = load_file(folder / STEPS)
    steps = np.split(stored["sequences"], np.cumsum(stored["lengths"])[:-1])
    return Sequences.load(folder / SEQUENCES), steps, json.loads((folder / PROBE_IDS).read_text())
