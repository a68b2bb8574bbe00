"""Settings that the update and the warm start share: loss, optimizer, schedule, and how the trainer runs.

What changes the weights is config; what only changes how they are computed (processes, packing) is execution.
"""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config import ConfigModel
from stages.policy.aggregation import Aggregation

Dtype = Literal["float32", "bfloat16"]


class LossConfig(ConfigModel):
    """How logprobs and advantages become a loss."""

    eps_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio to the old logprob is clipped below ``1 - eps_low``."""
    eps_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above ``1 + eps_high``."""
    ratio_floor: float | None = Field(default=None, ge=0)
    """Tokens with a smaller ratio are taken out of the loss, not out of its denominator. None: none are."""
    ratio_ceiling: float | None = Field(default=None, gt=0)
    """Tokens with a larger ratio are taken out of the loss, not out of its denominator. None: none are."""
    aggregation: Aggregation = "token-mean"
    """What counts alike in one optimizer step: tokens, trajectories or groups (see ``aggregation.py``)."""
    constant: int | None = Field(default=None, ge=1)
    """Tokens that the aggregation ``constant`` divides each trajectory's sum by; needed by it alone."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """How much entropy, aggregated like the loss, is subtracted from it."""

    @model_validator(mode="after")
    def _constant_where_needed(self) -> "LossConfig":
        if (self.aggregation == "constant") != (self.constant is not None):
            raise ValueError("loss.constant is needed by the aggregation 'constant', and by no other")
        return self


class KlConfig(ConfigModel):
    """A penalty on the divergence from another policy, in the loss."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """See ``kl.py``; the gradient of k1 vanishes in expectation on fresh samples."""
    coefficient: float = Field(gt=0)
    against: Literal["sampling", "reference"] = "reference"
    """The stored logprobs of the policy that sampled, or the policy given as the input ``reference``."""


class OptimizerConfig(ConfigModel):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    """Each from 0 to below 1."""
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Of matrices; vectors (norms, biases) are never decayed."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The gradient of a step is scaled down to this norm. None: it is not."""
    reset: bool = False
    """Begin with fresh moments and step 0 instead of those stored with the policy."""

    @model_validator(mode="after")
    def _betas_below_one(self) -> "OptimizerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("optimizer.betas must each be at least 0 and below 1")
        return self


class ScheduleConfig(ConfigModel):
    """Learning rate over optimizer steps, counted from the policy's fresh optimizer on."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from 0; step 1 has ``lr / warmup_steps``."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What follows: no change, or a fall to ``floor * lr`` at ``total_steps``."""
    total_steps: int | None = Field(default=None, ge=1)
    """Step at which the fall ends; needed by linear and cosine."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Share of ``lr`` that remains."""

    @model_validator(mode="after")
    def _total_where_needed(self) -> "ScheduleConfig":
        if (self.decay == "constant") != (self.total_steps is None):
            raise ValueError("schedule.total_steps is needed by the decays linear and cosine, and by no other")
        return self


class LoraConfig(ConfigModel):
    """A low-rank adapter (arXiv:2106.09685) that is trained in place of the weights, which stay as they are."""

    rank: int = Field(default=16, ge=1, le=512)
    """Of the two matrices beside each layer."""
    alpha: int = Field(default=32, ge=1)
    """What the adapter adds is scaled by ``alpha / rank``."""
    target_modules: list[str] | None = Field(default=None, min_length=1)
    """Last parts of the names of the linear layers that get one (``q_proj``, …). None: all of the decoder."""


class GateConfig(ConfigModel):
    """How far apart sampler and trainer may be; beyond it the update is given up before its first step.

    All sampled tokens of the update are compared, under the policy that sampled them and before any weight changes.
    """

    max_kl: float | None = Field(default=None, ge=0)
    """Most ``sampler_trainer_kl``, nats a token. None: any."""
    max_difference: float | None = Field(default=None, gt=0)
    """Most ``sampler_trainer_logprob_diff_max``. None: any."""
    max_off_share: float | None = Field(default=None, ge=0, le=1)
    """Most ``sampler_trainer_off_fraction``: share of tokens off by more than ``logprob_tolerance``. None: any."""

    @model_validator(mode="after")
    def _limits_something(self) -> "GateConfig":
        if self.max_kl is None and self.max_difference is None and self.max_off_share is None:
            raise ValueError("a gate needs a limit: max_kl, max_difference or max_off_share")
        return self


class TrainerExecution(ConfigModel):
    """How the trainer runs. Changes the result by rounding at most."""

    processes: int = Field(default=1, ge=1)
    """Data-parallel processes; several are started by DeepSpeed's launcher."""
    zero_stage: int = Field(default=0, ge=0, le=3)
    """What DeepSpeed partitions: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too. In bfloat16, 0 is
    done as 1, which keeps float32 master weights."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads a process. None: the processors shared among the processes."""
    device: Literal["auto", "cpu"] = "auto"
    """``auto``: the accelerator that DeepSpeed finds."""
    max_tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Tokens that are packed into one forward pass; more memory, fewer passes."""
    gradient_checkpointing: bool = False
    """Keep less of the forward pass and compute it again; less memory, a third more work."""
    cpu_collectives: Literal["gloo", "shm"] = "gloo"
    """How several processes on a CPU sum their gradients. ``shm``: DeepSpeed's operation in shared memory, which it
    compiles at its first use."""
