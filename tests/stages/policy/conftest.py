"""A policy small enough to be trained in a test, and trainings for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.policy.sequences import Sequences
from stages.policy.tiny import InitConfig, write_tiny_policy
from stages.policy.trainer import client
from stages.policy.trainer.job import Job

TINY = InitConfig(hidden_size=64, n_layers=2, n_kv_heads=1, intermediate_size=96, max_length=128)
VOCABULARY = 262


@pytest.fixture(scope="package", autouse=True)
def _trainer_ends() -> Iterator[None]:
    """The trainer stays warm from one file to the next."""
    yield
    client.stop()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights that differ much, so that mistakes show."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny_policy(folder, TINY, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def job_of(tiny_folder: Path, tmp_path: Path) -> Callable[..., Job]:
    """Makes jobs for the tiny policy; settings by name."""

    def make(**settings: Any) -> Job:
        given: dict[str, Any] = {
            "source": {"content": "tiny", "checkpoint": tiny_folder, "optimizer": None},
            "batch": tmp_path / "batch",
            "out": tmp_path / "out",
            "objective": "policy_gradient",
            "loss": {},
            "optimizer": {"lr": 1e-3},
            "schedule": {},
            "dtype": "float32",
            "zero_stage": 0,
            "max_tokens_per_micro_batch": 4096,
            "gradient_checkpointing": False,
            "logprob_tolerance": 0.01,
        }
        return Job.model_validate(given | settings)

    return make


def random_sequences(seed: int = 0, n: int = 12, turns: int = 2) -> Sequences:
    """Conversations of unlike length, four trajectories a group, with advantages and made-up logprobs."""
    random = np.random.default_rng(seed)
    ids, sampled, lengths = [], [], []
    for _ in range(n):
        parts = [(random.integers(6, VOCABULARY, size=random.integers(1, 7)), turn % 2) for turn in range(2 * turns)]
        ids.append(np.concatenate([part for part, _ in parts]))
        sampled.append(np.concatenate([np.full(len(part), bool(answer)) for part, answer in parts]))
        lengths.append(len(ids[-1]))
    mask = np.concatenate(sampled)
    advantages = np.repeat(random.normal(size=n), lengths)
    return Sequences(
        ids_T=np.concatenate(ids).astype(np.int32),
        sampled_T=mask,
        logprobs_T=np.where(mask, random.normal(-6, 1, size=len(mask)), np.nan).astype(np.float32),
        temperatures_T=np.where(mask, 1, np.nan).astype(np.float32),
        advantages_T=np.where(mask, advantages, np.nan).astype(np.float32),
        lengths_S=np.array(lengths, dtype=np.int64),
        trajectories_S=np.arange(n),
        groups_S=np.arange(n) // 4,
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch with one thread: sums come out in one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
