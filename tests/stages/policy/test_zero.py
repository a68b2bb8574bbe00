"""Whatever DeepSpeed partitions, and over however many processes: the same policy comes out."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.artifacts import Manifest
from stages.artifacts.store import Store, open_store
from stages.policy.trainer import client
from tests.stages.policy.stored import (
    EXECUTION,
    advantages_of,
    contents_of,
    metrics_of,
    rollouts_of,
    tiny_policy,
    updated,
    weights_of,
)

CONFIG: dict[str, Any] = {
    "epochs": 2,
    "minibatches": 2,
    # Small steps leave most tokens unclipped; a large eps and no limit let the size of a gradient show, which Adam and
    # the limit would hide.
    "optimizer": {"lr": 1e-4, "eps": 0.1, "weight_decay": 0.1, "max_grad_norm": None},
}


class Bench:
    """One policy with its rollouts, updated twice in a store of each way of doing it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def twice(self, label: str, *ways: dict[str, Any], **config: Any) -> tuple[Store, Manifest]:
        """Two updates; the second may be done in another way than the first."""
        store = open_store(self.folder / label)
        policy = tiny_policy(store)
        rollouts = rollouts_of(store, policy)
        advantages = advantages_of(store, rollouts)
        for way in (ways[0], ways[-1]):
            execution = EXECUTION.model_copy(update={"max_tokens_per_micro_batch": 60} | way)
            policy = updated(store, policy, rollouts, advantages, execution=execution, **(CONFIG | config))
        return store, policy


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("zero"))
    client.stop()


@pytest.fixture(scope="module")
def plain(bench: Bench) -> tuple[Store, Manifest]:
    """Without partitions, in one process."""
    return bench.twice("plain", {})


def assert_same(first: tuple[Store, Manifest], second: tuple[Store, Manifest], atol: float = 1e-7) -> None:
    from safetensors.numpy import load_file

    weights, others = weights_of(*first), weights_of(*second)
    assert weights.keys() == others.keys()
    for name in weights:
        np.testing.assert_allclose(others[name], weights[name], atol=atol, err_msg=name)
    states = [load_file(store.folder(p, "optimizer") / "optimizer.safetensors") for store, p in (first, second)]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        atol = 1e-4 * np.abs(states[0][name]).max()
        np.testing.assert_allclose(states[1][name], states[0][name], atol=atol, rtol=1e-3, err_msg=name)
    measured = [metrics_of(store, policy) for store, policy in (first, second)]
    assert measured[0]["grad_norm"] > 0.1
    for name in measured[0].keys() - {"tokens_per_s", "train_s"}:
        assert measured[1][name] == pytest.approx(measured[0][name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_makes_the_same_policy(bench: Bench, plain: tuple[Store, Manifest], stage: int) -> None:
    assert_same(plain, bench.twice(f"zero{stage}", {"zero_stage": stage}))


def test_the_zero_stage_may_change_between_updates(bench: Bench, plain: tuple[Store, Manifest]) -> None:
    assert_same(plain, bench.twice("three-one", {"zero_stage": 3}, {"zero_stage": 1}))
    assert_same(plain, bench.twice("zero-three", {"zero_stage": 0}, {"zero_stage": 3}))


def test_less_memory_makes_the_same_policy(bench: Bench, plain: tuple[Store, Manifest]) -> None:
    assert_same(plain, bench.twice("checkpointing", {"gradient_checkpointing": True}))


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("limit", [None, 0.01])
def test_the_gradient_is_limited_as_asked_and_told_as_it_was(bench: Bench, stage: int, limit: float | None) -> None:
    """After one step from nothing, Adam's first moment is a tenth of the gradient that it was given."""
    from safetensors.numpy import load_file

    optimizer = {"lr": 1e-3, "betas": (0.9, 0.95), "max_grad_norm": limit}
    store = open_store(bench.folder / "limits")
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    execution = EXECUTION.model_copy(update={"zero_stage": stage})
    advantages = advantages_of(store, rollouts, [30.0] + [-1.0] * 11, estimator="reinforce")
    new = updated(
        store, policy, rollouts, advantages,
        execution=execution, optimizer=optimizer, logprob_tolerance=1 + stage,
    )  # fmt: skip
    state = load_file(store.folder(new, "optimizer") / "optimizer.safetensors")
    norm = np.sqrt(sum((state[name] ** 2).sum() for name in state if name.startswith("exp_avg/"))) / 0.1
    told = metrics_of(store, new)["grad_norm"]
    assert told > 1.5
    assert norm == pytest.approx(told if limit is None else limit, rel=1e-3)


def test_bfloat16_keeps_master_weights_in_float32(bench: Bench, plain: tuple[Store, Manifest]) -> None:
    import torch
    from safetensors.torch import load_file

    store, policy = bench.twice("bfloat16", {}, dtype="bfloat16")
    folder = store.folder(policy, "checkpoint")
    weights = load_file(folder / "model.safetensors")
    state = load_file(store.folder(policy, "optimizer") / "optimizer.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for name, tensor in weights.items():
        master = state[f"master/{name}"]
        assert master.dtype == torch.float32
        torch.testing.assert_close(master.bfloat16(), tensor)
        assert (master != tensor.float()).any()
    float32 = weights_of(*plain)
    for name, tensor in weights.items():
        np.testing.assert_allclose(tensor.float().numpy(), float32[name], atol=0.03)


def test_a_cold_trainer_goes_on_in_bfloat16_as_a_warm_one(bench: Bench) -> None:
    warm = bench.twice("warm16", {}, dtype="bfloat16")
    store, policy = warm
    (first,) = policy.inputs["policy"]
    before = store.manifest(first)
    inputs = {name: store.manifest(refs[0]) for name, refs in policy.inputs.items()}
    client.stop()
    execution = EXECUTION.model_copy(update={"max_tokens_per_micro_batch": 60})
    cold = updated(
        store, before, inputs["rollouts"], inputs["advantages"], execution=execution,
        **(CONFIG | {"dtype": "bfloat16", "logprob_tolerance": 0.5}),
    )  # fmt: skip
    assert contents_of(cold) == contents_of(policy)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_processes_make_the_same_policy(bench: Bench, plain: tuple[Store, Manifest], stage: int) -> None:
    assert_same(plain, bench.twice(f"two-zero{stage}", {"processes": 2, "zero_stage": stage}))


@pytest.mark.slow
def test_the_number_of_processes_may_change_between_updates(bench: Bench, plain: tuple[Store, Manifest]) -> None:
    two, one = {"processes": 2, "zero_stage": 2}, {"processes": 1, "zero_stage": 0}
    assert_same(plain, bench.twice("two-one", two, one))
    assert_same(plain, bench.twice("one-two", one, two))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="the operation is compiled, and there is no compiler")
def test_the_compiled_operation_makes_the_same_policy(
    bench: Bench, plain: tuple[Store, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled in a folder of its own: in the user's, the lock of a compilation that was killed is waited for for ever.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert_same(plain, bench.twice("shm", {"processes": 2, "cpu_collectives": "shm"}))


@pytest.mark.slow
def test_a_process_without_work_takes_part(bench: Bench) -> None:
    """One group in one minibatch for three processes: some have nothing to compute."""
    few: dict[str, Any] = {"epochs": 1, "minibatches": 3}
    assert_same(
        bench.twice("few", {"max_tokens_per_micro_batch": 4096}, **few),
        bench.twice("few3", {"max_tokens_per_micro_batch": 30, "processes": 3, "zero_stage": 3}, **few),
    )
