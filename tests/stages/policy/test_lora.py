"""An update may train an adapter: only that is stored, its base stays as it is, and both together are the policy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.artifacts import Manifest
from schemas.errors import ConfigError, InputError
from stages.artifacts.adapters import base_of
from stages.artifacts.commit import Request, materialise
from stages.artifacts.gc import collect_garbage
from stages.artifacts.store import Store
from stages.artifacts.verify import verify
from stages.policy.lora import merge
from stages.policy.trainer import client
from stages.policy.warmstart import STAGE as WARMSTART
from tests.builders import stored_tasks
from tests.stages.policy.stored import (
    EXECUTION,
    advantages_of,
    contents_of,
    metrics_of,
    tiny_policy,
    updated,
    weights_of,
)
from tests.stages.policy.ways import (
    ADAPTER_CONFIG,
    LORA,
    STATE,
    Made,
    adapted_twice,
    assert_same_adapter,
    made_in,
)

ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A store with a policy, rollouts that it could have sampled, and their advantages."""
    return made_in(tmp_path_factory.mktemp("lora") / "store")


def probe_of(store: Store, policy: Manifest) -> list[tuple[list[int], list[float]]]:
    rows = store.inputs({"p": [policy]}).scan("p", "probe").sort("probe_id").collect()
    return list(zip(rows["ids"].to_list(), rows["logprobs"].to_list(), strict=True))


def assert_reproduces(model: Any, probe: list[tuple[list[int], list[float]]], atol: float = 1e-5) -> None:
    import torch

    for ids, logprobs in probe:
        with torch.no_grad():
            logs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1].float(), -1)
        found = logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(found, logprobs, atol=atol)


def test_the_artifact_is_an_adapter_that_names_its_base(made: Made) -> None:
    store, policy, *_ = made
    before = contents_of(policy)
    first, second = adapted_twice(made, EXECUTION)
    for adapter in (first, second):
        names = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors", "optimizer/optimizer.safetensors"}
        assert set(contents_of(adapter)) == names
        assert base_of(adapter) == policy.ref
        described = json.loads((store.folder(adapter, "adapter") / "adapter_config.json").read_text())
        assert described["base_model_name_or_path"] == f"policy/{policy.key}"
        assert (described["r"], described["lora_alpha"], described["target_modules"]) == (4, 8, ALL)
        assert "/" not in str(described | {"base_model_name_or_path": None}), "a path of this machine"
        assert {name.split(".")[-2] for name in weights_of(store, adapter)} == {"lora_A", "lora_B"}
    assert first.inputs["policy"] == second.inputs["base"] == [policy.ref]
    assert verify(store, policy) > 0
    assert contents_of(store.manifest(policy.ref)) == before
    assert base_of(policy) is None


def test_only_the_adapter_has_a_state_in_the_optimizer(made: Made) -> None:
    from safetensors.numpy import load_file

    store = made[0]
    first, second = adapted_twice(made, EXECUTION)
    state = load_file(store.folder(second, "optimizer") / "optimizer.safetensors")
    assert int(state.pop("step")) == 8
    assert len(state) == 2 * len(weights_of(store, second))
    assert all(".lora_A." in name or ".lora_B." in name for name in state)
    n_bytes = sum(file.bytes for file in second.files)
    assert n_bytes < sum(file.bytes for file in made[1].files)
    assert all(np.abs(w - weights_of(store, second)[name]).max() > 0 for name, w in weights_of(store, first).items())


def test_peft_s_own_model_reproduces_the_probe(made: Made) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    store, policy, *_ = made
    _, second = adapted_twice(made, EXECUTION)
    model = AutoModelForCausalLM.from_pretrained(store.folder(policy, "checkpoint"))
    probe = probe_of(store, second)
    with pytest.raises(AssertionError, match="Mismatched"):
        assert_reproduces(model.eval(), probe)
    assert_reproduces(PeftModel.from_pretrained(model, store.folder(second, "adapter")).eval(), probe)


def test_merged_with_its_base_it_is_a_plain_checkpoint(made: Made, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    store, policy, *_ = made
    _, second = adapted_twice(made, EXECUTION)
    merge(store.folder(policy, "checkpoint"), store.folder(second, "adapter"), tmp_path / "merged")
    before, after = store.folder(policy, "checkpoint"), tmp_path / "merged"
    assert {file.name for file in after.iterdir()} == {file.name for file in before.iterdir()}
    assert AutoTokenizer.from_pretrained(after).chat_template
    assert_reproduces(AutoModelForCausalLM.from_pretrained(after).eval(), probe_of(store, second))


def test_an_adapter_of_zero_steps_is_its_base(made: Made) -> None:
    """The first step is taken from the base: before it the trainer's logprobs are the sampler's."""
    metrics = metrics_of(made[0], updated(*made, lora=LORA))
    assert metrics["sampler_trainer_logprob_diff_max"] < 1e-5
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("trainer", ["holds another", pytest.param("is new", marks=pytest.mark.full)])
def test_what_is_stored_is_all_that_the_next_update_needs(made: Made, trainer: str) -> None:
    store, policy, rollouts, advantages = made
    first, warm = adapted_twice(made, EXECUTION, logprob_tolerance=0.02)
    if trainer == "is new":
        client.stop()
    else:
        updated(store, tiny_policy(store, seed=9), rollouts, advantages, lora=LORA)
    settings = ADAPTER_CONFIG | {"logprob_tolerance": 0.03 if trainer == "is new" else 0.04}
    loaded = updated(store, first, rollouts, advantages, base=policy, **settings)
    assert warm.key != loaded.key
    assert contents_of(warm) == contents_of(loaded)


def test_the_layers_may_be_chosen(made: Made) -> None:
    store = made[0]
    new = updated(*made, lora={"rank": 2, "target_modules": ["v_proj", "q_proj"]})
    assert {name.split(".")[-3] for name in weights_of(store, new)} == {"q_proj", "v_proj"}
    with pytest.raises(InputError, match=r"no linear layer c_proj in its decoder") as caught:
        updated(*made, lora={"target_modules": ["q_proj", "c_proj"]})
    assert all(name in (caught.value.hint or "") for name in ALL)


WAYS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "small micro-batches": {"max_tokens_per_micro_batch": 30},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("name", WAYS)
def test_whatever_is_partitioned_the_same_adapter_comes_out(made: Made, name: str) -> None:
    _, plain = adapted_twice(made, EXECUTION)
    way = EXECUTION.model_copy(update=WAYS[name])
    _, other = adapted_twice(
        made, way, EXECUTION, logprob_tolerance=0.1 + [*WAYS].index(name)
    )  # execution is in no key
    assert_same_adapter(made[0], plain, other)


def test_in_bfloat16_the_adapter_has_master_weights(made: Made) -> None:
    import torch
    from safetensors.torch import load_file

    store = made[0]
    _, new = adapted_twice(made, EXECUTION, dtype="bfloat16")
    weights = load_file(store.folder(new, "adapter") / "adapter_model.safetensors")
    state = load_file(store.folder(new, "optimizer") / STATE)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    masters = {name: tensor for name, tensor in state.items() if name.startswith("master/")}
    assert len(masters) == len(weights)
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}


def test_the_base_is_needed_exactly_by_an_adapter_and_must_be_its_own(made: Made) -> None:
    store, policy, rollouts, advantages = made
    adapter = updated(*made, lora=LORA)
    other = tiny_policy(store, seed=2)
    with pytest.raises(ConfigError, match="needs its base") as caught:
        updated(store, adapter, rollouts, advantages, lora=LORA)
    assert caught.value.hint == f"base={policy.ref}"
    with pytest.raises(InputError, match=f"is an adapter of {policy.ref} .* not of the given {other.ref}"):
        updated(store, adapter, rollouts, advantages, lora=LORA, base=other)
    with pytest.raises(ConfigError, match="it is no adapter"):
        updated(store, policy, rollouts, advantages, lora=LORA, base=policy)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        (None, "without lora all weights would be trained"),
        (LORA | {"rank": 8}, r"rank 4, alpha 8 .* with lora.rank=8"),
        (LORA | {"alpha": 4}, r"lora.alpha=4"),
        (LORA | {"target_modules": ["q_proj"]}, r"lora.target_modules=q_proj"),
    ],
)
def test_an_adapter_is_trained_on_as_it_is_or_refused(made: Made, lora: Any, told: str) -> None:
    store, policy, rollouts, advantages = made
    adapter = updated(*made, lora=LORA)
    with pytest.raises(ConfigError, match=told):
        updated(store, adapter, rollouts, advantages, lora=lora, base=policy)


def test_an_adapter_cannot_be_warm_started(made: Made) -> None:
    store = made[0]
    inputs = {"policy": [updated(*made, lora=LORA)], "tasks": [stored_tasks(store)]}
    with pytest.raises(InputError, match="is an adapter, and a warm start trains all weights"):
        materialise(store, Request(WARMSTART, WARMSTART.Config(), EXECUTION, inputs, 1))


def test_a_penalty_against_the_base_or_an_adapter_of_it(made: Made) -> None:
    store, policy, rollouts, advantages = made
    kl = {"coefficient": 1.0, "estimator": "k3", "against": "reference"}
    adapter = updated(*made, lora=LORA, optimizer={"lr": 1e-2})
    settings: dict[str, Any] = {"lora": LORA, "base": policy}
    itself = updated(store, adapter, rollouts, advantages, kl=kl, reference=adapter, **settings)
    plain = updated(store, adapter, rollouts, advantages, **settings)
    from_base = updated(store, adapter, rollouts, advantages, kl=kl, reference=policy, **settings)
    losses = [metrics_of(store, p)["loss"] for p in (plain, itself, from_base)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert losses[2] > losses[0] + 1e-3
    stranger = tiny_policy(store, seed=3)
    strange = updated(store, stranger, rollouts, advantages, lora=LORA)
    with pytest.raises(InputError, match="is none of the same base"):
        updated(store, adapter, rollouts, advantages, kl=kl, reference=strange, **settings)


def test_nothing_to_train_on_passes_the_adapter_on(made: Made) -> None:
    store, policy, rollouts, _ = made
    adapter = updated(*made, lora=LORA)
    flat = advantages_of(store, rollouts, [1.0] * 12)
    passed = updated(store, adapter, rollouts, flat, lora=LORA, base=policy)
    assert contents_of(passed) == contents_of(adapter)
    assert base_of(passed) == policy.ref


def test_garbage_collection_keeps_the_base(made: Made) -> None:
    store, policy, *_ = made
    adapted_twice(made, EXECUTION)
    collect_garbage(store, grace_s=0, delete=True, optimizers=True)
    assert verify(store, policy) > 0
    assert (store.folder(policy, "checkpoint") / "model.safetensors").exists()
