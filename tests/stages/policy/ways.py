"""Updates done in different ways, and the comparison of what comes out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.artifacts import Manifest
from stages.artifacts.store import Store, open_store
from stages.policy.settings import TrainerExecution
from tests.builders import given
from tests.stages.policy.stored import (
    EXECUTION,
    advantages_of,
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
LORA = {"rank": 4, "alpha": 8}
ADAPTER_CONFIG: dict[str, Any] = {
    "lora": LORA,
    "epochs": 2,
    "minibatches": 2,
    "optimizer": {"lr": 1e-2, "eps": 0.1, "max_grad_norm": None},
}
STATE = "optimizer.safetensors"


class Bench:
    """One policy with its rollouts, updated twice in a store of each way of doing it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def twice(self, label: str, *ways: dict[str, Any], alone: bool = False, **config: Any) -> tuple[Store, Manifest]:
        """Two updates; the second may be done in another way than the first.

        Args:
            alone: there is one attempt at each task.
        """
        store = open_store(self.folder / label)
        policy = tiny_policy(store)
        if alone:
            rollouts = rollouts_of(store, policy, samples=1)
            advantages = advantages_of(store, rollouts, [1.0, -1.0, 2.0], estimator="reinforce")
        else:
            rollouts = rollouts_of(store, policy)
            advantages = advantages_of(store, rollouts)
        for way in (ways[0], ways[-1]):
            execution = EXECUTION.model_copy(update={"max_tokens_per_micro_batch": 60} | way)
            policy = updated(store, policy, rollouts, advantages, execution=execution, **(CONFIG | config))
        return store, policy


def assert_same(first: tuple[Store, Manifest], second: tuple[Store, Manifest], atol: float = 1e-7) -> None:
    """Weights, state of the optimizer and measurements are those of the other way."""
    from safetensors.numpy import load_file

    weights, others = weights_of(*first), weights_of(*second)
    assert weights.keys() == others.keys()
    for name in weights:
        np.testing.assert_allclose(others[name], weights[name], atol=atol, err_msg=name)
    states = [load_file(store.folder(p, "optimizer") / STATE) for store, p in (first, second)]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        atol = 1e-4 * np.abs(states[0][name]).max()
        np.testing.assert_allclose(states[1][name], states[0][name], atol=atol, rtol=1e-3, err_msg=name)
    measured = [metrics_of(store, policy) for store, policy in (first, second)]
    assert measured[0]["grad_norm"] > 0.1
    for name in measured[0].keys() - {"tokens_per_s", "train_s"}:
        assert measured[1][name] == pytest.approx(measured[0][name], rel=1e-3, abs=1e-5), name


Made = tuple[Store, Manifest, Manifest, Manifest]
"""A store with a policy, rollouts that it could have sampled, and their advantages."""


def made_in(folder: Path) -> Made:
    store = open_store(folder)
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    return store, policy, rollouts, advantages_of(store, rollouts)


SHIFT = {"t000": 0.0, "t001": 0.02, "t002": -0.2}
"""Added to the stored logprobs of each task's attempts."""


def shifted_in(folder: Path) -> Made:
    """The same, with logprobs that are off by ``SHIFT``."""
    store = open_store(folder)
    policy = tiny_policy(store)
    read = store.inputs({"r": [rollouts_of(store, policy)]})
    episodes = read.scan("r", "episodes").collect().to_dicts()
    steps = read.scan("r", "steps").collect().to_dicts()
    for step in steps:
        step["logprobs"] = [value + SHIFT[step["episode_id"][:4]] for value in step["logprobs"]]
    rollouts = given(store, "rollouts", {"episodes": episodes, "steps": steps}, inputs={"policy": [policy]})
    return store, policy, rollouts, advantages_of(store, rollouts)


def adapted_twice(made: Made, *ways: TrainerExecution, **config: Any) -> tuple[Manifest, Manifest]:
    """Two updates, the second of the first's adapter, on the same rollouts."""
    store, policy, rollouts, advantages = made
    settings: dict[str, Any] = ADAPTER_CONFIG | config
    first = updated(store, policy, rollouts, advantages, execution=ways[0], **settings)
    return first, updated(store, first, rollouts, advantages, execution=ways[-1], base=policy, **settings)


def assert_same_adapter(store: Store, first: Manifest, second: Manifest) -> None:
    """Weights and state of the optimizer are those of the other way."""
    from safetensors.numpy import load_file

    for read in (lambda p: weights_of(store, p), lambda p: load_file(store.folder(p, "optimizer") / STATE)):
        one, two = read(first), read(second)
        assert one.keys() == two.keys()
        for tensor in one:
            atol = max(1e-6, 1e-4 * np.abs(one[tensor]).max())
            np.testing.assert_allclose(two[tensor], one[tensor], atol=atol, rtol=1e-3, err_msg=tensor)
