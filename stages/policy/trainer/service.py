"""What a trainer's process keeps between jobs: the process group, the learner, the reference model."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from stages.policy.trainer.job import PROBE_LOGPROBS, Job, Result, read_batch
from stages.policy.trainer.learner import DTYPES, Learner
from stages.policy.trainer.model import load_model
from stages.policy.trainer.update import train
from stages.policy.trainer.wire import COLLECTIVES_VARIABLE


class Service:
    """Does one job after the other; keeps the policy that the last one made."""

    def __init__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # DeepSpeed's buffers are of gigabytes; to fill them took a second a step
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if os.environ[COLLECTIVES_VARIABLE] == "gloo":
            # DeepSpeed compiles its shared-memory operation for CPUs if this table says that it can
            deepspeed.ops.__compatible_ops__ = {}
        backend = deepspeed.get_accelerator().communication_backend_name()
        if os.environ["WORLD_SIZE"] == "1":
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(backend, verbose=False, timeout=timedelta(hours=6))
        import transformers  # noqa: F401 - while the pipeline is still sampling

        self._learner: Learner | None = None
        self._reference: tuple[tuple[str, str], Any] | None = None

    def run(self, message: dict[str, Any], progress: Callable[[int, int], None]) -> dict[str, Any]:
        job = Job.model_validate(message)
        learner = self._learner_for(job)
        reference = self._reference_for(job, learner)
        self._learner = None  # an update that fails must not leave half a policy behind
        batch, steps, probe_ids = read_batch(job.batch)
        metrics = train(learner, reference, job, batch, steps, progress)
        logprobs = learner.probe(probe_ids)
        is_first = dist.get_rank() == 0
        content: str | None = learner.save(job.out, with_optimizer=job.save_optimizer, write=is_first)
        if is_first:
            (job.out / PROBE_LOGPROBS).write_text(json.dumps(logprobs))
        if job.save_optimizer:
            self._learner = learner
        else:  # what it holds is more than what was stored
            learner.destroy()
            content = None
        return Result(metrics=metrics, content=content).model_dump(mode="json")

    def _learner_for(self, job: Job) -> Learner:
        learner = self._learner
        if learner is None or job.source.checkpoint is not None or learner.shape != job.shape:
            if learner is not None:
                learner.destroy()
            self._learner = learner = None
            learner = Learner(job)
        learner.configure(job.optimizer)
        return learner

    def _reference_for(self, job: Job, learner: Learner) -> Any:
        if job.reference is None:
            return None
        wanted = (job.reference.content, job.dtype)
        if self._reference is None or self._reference[0] != wanted:
            assert job.reference.checkpoint is not None
            model = load_model(
                job.reference.checkpoint, DTYPES[job.dtype], trained=False, adapter=job.reference.adapter
            )
            self._reference = (wanted, model.to(learner.device))
        return self._reference[1]
