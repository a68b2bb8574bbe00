"""What sampler and trainer disagree on is measured before anything is learnt, and a gate refuses the update."""

from typing import Any

import numpy as np
import pytest

from schemas.artifacts import Manifest
from schemas.errors import ConfigError, RollmillError, StageFailed
from stages.artifacts.store import Store
from stages.policy.settings import GateConfig
from tests.stages.policy.stored import advantages_of, metrics_of, rollouts_of, updated
from tests.stages.policy.ways import SHIFT, Made, shifted_in

TOLERANCE = 0.01


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A store with a policy, rollouts whose logprobs are off by ``SHIFT``, and their advantages."""
    return shifted_in(tmp_path_factory.mktemp("gate") / "store")


def differences(store: Store, rollouts: Manifest) -> np.ndarray:
    """Trainer's logprob minus sampler's of every sampled token."""
    steps = store.inputs({"r": [rollouts]}).scan("r", "steps").collect()
    return np.concatenate(
        [
            np.full(len(ids), -SHIFT[episode[:4]])
            for episode, ids in zip(steps["episode_id"], steps["response_ids"], strict=True)
        ]
    )


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_numbers_are_those_of_the_formulas_over_every_token(shifted: Any, minibatches: int, epochs: int) -> None:
    store, _, rollouts, _ = shifted
    gate = {"max_kl": 1.0}
    new = updated(*shifted, gate=gate, minibatches=minibatches, epochs=epochs, logprob_tolerance=TOLERANCE)
    metrics, d = metrics_of(store, new), differences(store, rollouts)
    assert metrics["sampler_trainer_tokens"] == len(d) == metrics["tokens"] / epochs
    assert metrics["sampler_trainer_kl"] == pytest.approx(np.mean(np.exp(d) - 1 - d), abs=1e-5)
    assert metrics["sampler_trainer_kl_k1"] == pytest.approx(np.mean(-d), abs=1e-5)
    assert metrics["sampler_trainer_logprob_diff_max"] == pytest.approx(0.2, abs=1e-5)
    assert metrics["sampler_trainer_off_fraction"] == pytest.approx(np.mean(np.abs(d) > TOLERANCE))


def test_without_a_gate_they_are_of_the_first_step_alone(shifted: Any) -> None:
    store, _, rollouts, _ = shifted
    metrics = metrics_of(store, updated(*shifted, minibatches=3, optimizer={"lr": 0.1}))
    assert 0 < metrics["sampler_trainer_tokens"] < len(differences(store, rollouts))
    shifts = np.abs(list(SHIFT.values()))  # each task is a minibatch; whatever was learnt later does not show
    assert np.abs(shifts - metrics["sampler_trainer_logprob_diff_max"]).min() < 1e-5


@pytest.mark.parametrize(
    ("gate", "told"),
    [
        ({"max_kl": 1e-4}, r"sampler_trainer_kl is 0\.00\d+, and max_kl allows 0\.0001"),
        ({"max_difference": 0.1}, r"sampler_trainer_logprob_diff_max is 0\.2, and max_difference allows 0\.1"),
        ({"max_off_share": 0.5}, r"sampler_trainer_off_fraction is 0\.\d+, and max_off_share allows 0\.5"),
    ],
)
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_limit_that_is_passed_refuses_the_update(shifted: Any, gate: Any, told: str, minibatches: int) -> None:
    store = shifted[0]
    before = store.storage.names("artifacts/policy")
    with pytest.raises(StageFailed, match=told) as caught:
        updated(*shifted, gate=gate, minibatches=minibatches)
    assert "nothing was stored" in str(caught.value)
    assert "rollouts stay" in (caught.value.hint or "")
    begun = set(store.storage.names("artifacts/policy")) - set(before)
    assert all(store.find("policy", key) is None for key in begun)
    assert metrics_of(store, updated(*shifted, gate={"max_difference": 0.3}, minibatches=minibatches))["tokens"] > 0


def test_a_gate_on_another_policy_s_rollouts_is_refused(shifted: Any) -> None:
    """There the difference would be what was learnt in between."""
    store, policy, rollouts, advantages = shifted
    later = updated(*shifted)
    with pytest.raises(ConfigError, match=f"was sampled by {policy.ref}"):
        updated(store, later, rollouts, advantages, gate={"max_kl": 1.0})
    assert metrics_of(store, updated(store, later, rollouts, advantages))["sampler_trainer_tokens"] > 0


def test_a_gate_that_nothing_can_be_compared_by_is_refused(shifted: Any) -> None:
    store, policy, *_ = shifted
    rollouts = rollouts_of(store, policy, logprobs=None, logprob_mode=None)
    chosen = advantages_of(store, rollouts, estimator="rejection")
    with pytest.raises(RollmillError, match="hold no logprobs"):
        updated(store, policy, rollouts, chosen, objective="cross_entropy", gate={"max_kl": 1.0})


def test_a_gate_has_a_limit() -> None:
    with pytest.raises(ValueError, match="needs a limit"):
        GateConfig()
