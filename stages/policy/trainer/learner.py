"""The policy in training: a DeepSpeed engine around a Hugging Face model, its optimizer state, its probe."""

from pathlib import Path
from typing import Any

import torch

from schemas.errors import InputError, StageFailed
from stages.artifacts.adapters import ADAPTER
from stages.policy.checkpoint import (
    ADAPTER_FILE,
    CHECKPOINT,
    OPTIMIZER,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    companions_of,
    content_hash,
    sha256_of,
)
from stages.policy.sequences import plain_sequences
from stages.policy.settings import OptimizerConfig
from stages.policy.trainer import optimizer_state
from stages.policy.trainer.adapter import begin_adapter, write_adapter
from stages.policy.trainer.forward import logprobs_of, row_of, sampled_logits
from stages.policy.trainer.job import Job
from stages.policy.trainer.model import load_model, save_model, whole_parameters

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Learner:
    """Holds one policy between updates."""

    def __init__(self, job: Job):
        if job.source.checkpoint is None:
            raise InputError("the trainer no longer holds the policy, and was given no checkpoint to load")
        self.shape = job.shape
        self._base = job.base
        self._companions = companions_of(job.source.checkpoint)
        self.engine = _engine(job)
        self._grad_norm = 0.0
        if self.engine.zero_optimization_stage() == 0:
            self.engine.basic_optimizer.register_step_pre_hook(self._clip)
        if job.source.optimizer is None:
            optimizer_state.begin(self.engine)
        else:
            try:
                optimizer_state.restore(self.engine, job.source.optimizer)
            except ValueError as error:
                raise InputError(str(error), hint="optimizer.reset=true begins with a fresh state") from error

    @property
    def device(self) -> torch.device:
        return torch.device(self.engine.device)

    def configure(self, settings: OptimizerConfig) -> None:
        """Takes up another job's optimizer settings."""
        self._max_grad_norm = settings.max_grad_norm
        for group in self.engine.basic_optimizer.param_groups:
            group |= {"betas": settings.betas, "eps": settings.eps}
            group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
        if settings.reset:
            optimizer_state.begin(self.engine)

    @property
    def n_steps(self) -> int:
        """Optimizer steps since the optimizer was fresh."""
        return optimizer_state.step_count(self.engine)

    def step(self, lr: float) -> float:
        """Applies the gradient that ``engine.backward`` summed; returns its norm before clipping.

        Raises:
            StageFailed: the gradient is not finite; the policy would be lost.
        """
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        if self.engine.zero_optimization_stage() > 0:
            self._grad_norm = float(self.engine.get_global_grad_norm())
        if not self._grad_norm < float("inf"):
            raise StageFailed(
                f"the gradient's norm is {self._grad_norm}: the update was given up, nothing was stored",
                hint="a smaller learning rate, or float32, may help",
            )
        return self._grad_norm

    def probe(self, ids: list[list[int]]) -> list[list[float]]:
        """Logprob of each id after those before it."""
        with torch.no_grad():
            row = row_of(plain_sequences(ids, [1] * len(ids)), self.device)
            logprobs = logprobs_of(sampled_logits(self.engine, row), row)
        return [part.tolist() for part in torch.split(logprobs.cpu(), [len(one) - 1 for one in ids])]

    def save(self, out: Path, *, with_optimizer: bool, write: bool) -> str:
        """Writes checkpoint or adapter, and optimizer, below ``out``; returns the hash of the policy where it wrote.

        Args:
            write: true in one process; the others only take part in gathering.
        """
        from safetensors.torch import save_file

        weights = whole_parameters(self.engine.module, partitioned=self.engine.zero_optimization_stage() == 3)
        state = optimizer_state.collect(self.engine)
        if not write:
            return ""
        if self._base is not None:
            write_adapter(self.engine.module, weights, f"{self._base.kind}/{self._base.key}", out / ADAPTER)
            files = [out / ADAPTER / ADAPTER_FILE]
        else:
            save_model(self.engine.module, weights, out / CHECKPOINT)
            for name, content in self._companions.items():
                (out / CHECKPOINT / name).write_bytes(content)
            files = [out / CHECKPOINT / WEIGHTS_FILE]
        if with_optimizer:
            (out / OPTIMIZER).mkdir()
            files.append(out / OPTIMIZER / OPTIMIZER_FILE)
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, files[-1])
        base = [] if self._base is None else [self._base.digest]
        return content_hash(base + [sha256_of(file) for file in files])

    def destroy(self) -> None:
        """Gives the memory back."""
        self.engine.destroy()

    def _clip(self, *_: Any) -> None:
        parameters = [one for one in self.engine.module.parameters() if one.requires_grad]
        limit = self._max_grad_norm if self._max_grad_norm is not None else float("inf")
        self._grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))


def _engine(job: Job) -> Any:
    import deepspeed

    assert job.source.checkpoint is not None
    model = load_model(job.source.checkpoint, DTYPES[job.dtype], trained=True, adapter=job.source.adapter)
    if job.lora is not None and job.source.adapter is None:
        begin_adapter(model, job.lora)
    if job.source.optimizer is not None and job.dtype == "float32":
        optimizer_state.take_up_master(model, job.source.optimizer)
    if job.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if (p.ndim > 1) == decays], "decays": decays} for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=job.optimizer.lr)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # the boundary is where the learner calls step
        "zero_optimization": {"stage": job.effective_zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        "gradient_clipping": job.shape[3] or 0.0,  # DeepSpeed's own default is 1
    }
    if job.dtype == "bfloat16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine
