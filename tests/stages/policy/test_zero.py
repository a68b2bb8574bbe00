"""Whatever DeepSpeed partitions: the same policy comes out."""

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
from tests.stages.policy.ways import CONFIG, Bench, assert_same


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("zero"))


@pytest.fixture(scope="module")
def plain(bench: Bench) -> tuple[Store, Manifest]:
    """Without partitions, in one process."""
    return bench.twice("plain", {})


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


@pytest.mark.parametrize("trainer", ["holds another", pytest.param("is new", marks=pytest.mark.full)])
def test_what_is_stored_in_bfloat16_is_all_that_the_next_update_needs(bench: Bench, trainer: str) -> None:
    store, policy = bench.twice("bfloat16", {}, dtype="bfloat16")
    (first,) = policy.inputs["policy"]
    before = store.manifest(first)
    inputs = {name: store.manifest(refs[0]) for name, refs in policy.inputs.items()}
    if trainer == "is new":
        client.stop()
    else:
        updated(store, tiny_policy(store, seed=9), inputs["rollouts"], inputs["advantages"])
    loaded = updated(
        store, before, inputs["rollouts"], inputs["advantages"],
        execution=EXECUTION.model_copy(update={"max_tokens_per_micro_batch": 60}),
        **(CONFIG | {"dtype": "bfloat16", "logprob_tolerance": 0.5 if trainer == "is new" else 0.6}),
    )  # fmt: skip
    assert loaded.key != policy.key
    assert contents_of(loaded) == contents_of(policy)
