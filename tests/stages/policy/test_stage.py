from typing import Any

import numpy as np
import pytest

from schemas.artifacts import Manifest
from schemas.errors import ConfigError, InputError
from stages.artifacts.store import Store, open_store
from stages.policy import stage as policy_stage
from stages.policy.trainer import client
from tests.builders import advantage_rows, given
from tests.stages.policy.stored import (
    advantages_of,
    contents_of,
    metrics_of,
    rollouts_of,
    tiny_policy,
    updated,
    weights_of,
)

Inputs = tuple[Store, Manifest, Manifest, Manifest]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A store with a policy, rollouts that it could have sampled, and their advantages."""
    store = open_store(tmp_path_factory.mktemp("policy") / "store")
    policy = tiny_policy(store)
    rollouts = rollouts_of(store, policy)
    return store, policy, rollouts, advantages_of(store, rollouts)


def test_an_update_makes_a_policy_that_others_can_load(made: Inputs) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    store, policy, *_ = made
    new = updated(*made)
    before, after = weights_of(store, policy), weights_of(store, new)
    assert before.keys() == after.keys()  # the tied head is not stored twice
    assert all(np.abs(after[name] - before[name]).max() > 1e-5 for name in before)
    folder = store.folder(new, "checkpoint")
    assert AutoTokenizer.from_pretrained(folder).chat_template
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for row in store.inputs({"p": [new]}).scan("p", "probe").collect().to_dicts():
        ids = torch.tensor([row["ids"]])
        logs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(row["logprobs"], logs.detach().numpy(), atol=1e-5)


def test_the_measurements_are_those_of_the_step(made: Inputs) -> None:
    store, _, rollouts, _ = made
    new = updated(*made)
    metrics = metrics_of(store, new)
    steps = store.inputs({"r": [rollouts]}).scan("r", "steps").collect()
    assert metrics["tokens"] == steps["response_ids"].list.len().sum()
    assert metrics["reward"] == 0.5
    assert metrics["trajectories_trained"] == metrics["trajectories"] == 12
    assert metrics["optimizer_steps"] == 1
    assert metrics["lr"] == 1e-3
    assert metrics["sampler_trainer_logprob_diff_max"] < 1e-5
    assert metrics["sampler_trainer_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["sampler_trainer_off_fraction"] == 0
    assert metrics["clip_fraction"] == 0
    assert 0 < metrics["entropy"] < np.log(262) + 1e-6
    assert metrics["grad_norm"] > 0
    assert metrics["tokens_per_s"] > 0
    # before anything is learnt every ratio is 1, so the loss is minus the mean advantage over tokens
    advantages = store.inputs({"a": [made[3]]}).scan("a", "advantages").select("episode_id", "advantage").collect()
    tokens = steps.select("episode_id", steps["response_ids"].list.len().alias("n")).join(advantages, on="episode_id")
    expected = -np.average(tokens["advantage"].to_numpy(), weights=tokens["n"].to_numpy())
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert new.summary["loss"] == metrics["loss"]


def test_run_and_iteration_are_left_to_the_reader(made: Inputs) -> None:
    rows = made[0].inputs({"p": [updated(*made)]}).scan("p", "metrics").collect()
    assert rows["run"].is_null().all()
    assert rows["iteration"].is_null().all()
    assert set(rows["stage"]) == {"policy"}


def test_epochs_and_minibatches_are_optimizer_steps(made: Inputs) -> None:
    metrics = metrics_of(made[0], updated(*made, epochs=2, minibatches=3))
    assert metrics["optimizer_steps"] == 6
    assert metrics["kl"] > 1e-5  # the policy has moved between the steps
    assert metrics["sampler_trainer_kl"] == pytest.approx(0, abs=1e-9)


def test_a_good_answer_becomes_likelier(made: Inputs) -> None:
    """One step on one good trajectory raises its logprob."""
    store, policy, rollouts, _ = made
    advantages = advantages_of(store, rollouts, [1.0] + [0.0] * 11)
    new = updated(store, policy, rollouts, advantages, optimizer={"lr": 1e-4})
    again = rollouts_of(store, new)
    sums = []
    for given_rollouts in (rollouts, again):
        steps = store.inputs({"r": [given_rollouts]}).scan("r", "steps").sort("episode_id").collect()
        sums.append(steps["logprobs"].list.sum()[0])
    assert sums[1] > sums[0]


def test_nothing_to_train_on_passes_the_policy_on(made: Inputs) -> None:
    store, policy, rollouts, _ = made
    client.stop()
    flat = advantages_of(store, rollouts, [1.0] * 12)
    new = updated(store, policy, rollouts, flat)
    assert client._current is None  # no trainer was needed
    assert contents_of(new) == contents_of(policy)
    metrics = metrics_of(store, new)
    assert (metrics["optimizer_steps"], metrics["trajectories_trained"], metrics["reward"]) == (0, 0, 1.0)
    probes = [store.inputs({"p": [p]}).scan("p", "probe").collect() for p in (policy, new)]
    assert probes[0].equals(probes[1])


def test_a_policy_that_was_passed_on_keeps_its_optimizer(made: Inputs) -> None:
    store, _, rollouts, _ = made
    trained = updated(*made)
    passed = updated(store, trained, rollouts, advantages_of(store, rollouts, [1.0] * 12))
    assert contents_of(passed) == contents_of(trained)
    assert "optimizer/optimizer.safetensors" in contents_of(passed)


def test_a_penalty_against_the_policy_itself_pulls_at_nothing(made: Inputs) -> None:
    store, policy, *_ = made
    kl = {"coefficient": 1.0, "estimator": "k3", "against": "reference"}
    plain, itself = updated(*made), updated(*made, kl=kl, reference=policy)
    for name, weights in weights_of(store, plain).items():
        np.testing.assert_allclose(weights_of(store, itself)[name], weights, atol=1e-6)
    other = updated(*made, kl=kl, reference=tiny_policy(store, seed=2))
    assert metrics_of(store, other)["loss"] > metrics_of(store, plain)["loss"] + 0.01


def test_processed_logprobs_are_compared_at_their_temperature(made: Inputs) -> None:
    store, policy, *_ = made
    raw = rollouts_of(store, policy, temperature=0.7)
    processed = rollouts_of(store, policy, temperature=0.7, logprob_mode="processed")
    found = [metrics_of(store, updated(store, policy, r, advantages_of(store, r))) for r in (raw, processed)]
    assert found[0]["sampler_trainer_logprob_diff_max"] < 1e-5
    assert found[1]["sampler_trainer_logprob_diff_max"] > 0.1


def test_imitation_needs_no_logprobs(made: Inputs) -> None:
    store, policy, *_ = made
    rollouts = rollouts_of(store, policy, logprobs=None, logprob_mode=None)
    chosen = advantages_of(store, rollouts, estimator="rejection")
    metrics = metrics_of(store, updated(store, policy, rollouts, chosen, objective="cross_entropy"))
    assert metrics["loss"] > 4  # about log 262 a token
    assert "sampler_trainer_kl" not in metrics
    with pytest.raises(InputError, match=r"episode t000-0, trajectory default.* have no logprobs"):
        updated(store, policy, rollouts, advantages_of(store, rollouts))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"top_p": 0.9}, "cut by top_p"),
        ({"top_k": 20}, "cut by top_k"),
        ({"temperature": 0.0}, "greedily"),
        ({"temperature": None}, "temperature that is not known"),
    ],
)
def test_processed_logprobs_that_cannot_be_computed_again_are_refused(
    made: Inputs, columns: dict[str, Any], message: str
) -> None:
    store, policy, *_ = made
    rollouts = rollouts_of(store, policy, n_tasks=1, logprob_mode="processed", **columns)
    with pytest.raises(InputError, match=message):
        updated(store, policy, rollouts, advantages_of(store, rollouts))


def test_answers_that_were_kept_to_a_json_schema_are_refused_where_logprobs_count(made: Inputs) -> None:
    store, policy, *_ = made
    rollouts = rollouts_of(store, policy, n_tasks=1, logprob_mode="constrained")
    with pytest.raises(InputError, match="were kept to a JSON schema"):
        updated(store, policy, rollouts, advantages_of(store, rollouts))


def test_rollouts_without_token_ids_are_refused_by_name(made: Inputs) -> None:
    store, policy, *_ = made
    rollouts = rollouts_of(store, policy, n_tasks=1, prompt_ids=None)
    with pytest.raises(InputError, match=r"episode t000-0, trajectory default; .*; and 1 more have no prompt_ids"):
        updated(store, policy, rollouts, advantages_of(store, rollouts))


def test_advantages_for_another_objective_are_refused(made: Inputs) -> None:
    store, policy, rollouts, advantages = made
    with pytest.raises(ConfigError, match=r"for the objective policy_gradient.*cross_entropy"):
        updated(store, policy, rollouts, advantages, objective="cross_entropy")


def test_advantages_of_other_rollouts_are_refused(made: Inputs) -> None:
    store, policy, _, advantages = made
    other = rollouts_of(store, policy, n_tasks=1)
    with pytest.raises(InputError, match=f"was computed from rollouts/.*, not from the given {other.ref}"):
        updated(store, policy, other, advantages)


def test_an_advantage_without_its_rollout_is_refused(made: Inputs) -> None:
    store, policy, rollouts, _ = made
    strays = given(store, "advantages", {"advantages": advantage_rows(["t000-0", "elsewhere-0"], [1.0, -1.0])})
    with pytest.raises(InputError, match="do not have: episode elsewhere-0"):
        updated(store, policy, rollouts, strays)


def test_a_reference_is_given_exactly_where_a_penalty_uses_it(made: Inputs) -> None:
    with pytest.raises(ConfigError, match="needs the input 'reference'"):
        updated(*made, kl={"coefficient": 0.1})
    with pytest.raises(ConfigError, match="no penalty uses it"):
        updated(*made, reference=made[1])


def test_the_stage_can_be_imported_without_a_heavy_library() -> None:
    import subprocess
    import sys

    heavy = ["torch", "transformers", "deepspeed", "polars", "safetensors"]
    code = (
        "import sys, stages.policy.stage, stages.policy.warmstart, stages.policy.tiny, stages.policy.importing;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    assert policy_stage.STAGE.name == "policy"
