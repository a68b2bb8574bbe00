"""A recipe with ``update.lora`` trains an adapter; its base is found wherever it is needed, and nobody names it."""

import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from safetensors.numpy import load_file

import rollmill as public
from schemas.artifacts import Manifest
from stages.artifacts.adapters import base_of
from stages.artifacts.gc import collect_garbage
from stages.artifacts.store import Store, open_store
from stages.artifacts.verify import verify
from tests.flows.background import background
from tests.flows.commands import command, rollmill
from tests.flows.trained import recipe

LORA = {"rank": 4, "alpha": 16}


@pytest.fixture(scope="module")
def recipe_of_lora(tmp_path_factory: pytest.TempPathFactory, grader_file: Path) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "lora.yaml"
    file.write_text(yaml.safe_dump(recipe(grader_file) | {"update": {"optimizer": {"lr": 0.05}, "lora": LORA}}))
    return file


@pytest.fixture(scope="module")
def store(prefect: None, tmp_path_factory: pytest.TempPathFactory, recipe_of_lora: Path) -> Store:
    """A store with the run ``lora`` of two iterations."""
    url = str(tmp_path_factory.mktemp("lora") / "store")
    done = rollmill("train", recipe_of_lora, "run=lora", "--store", url)
    assert done.code == 0, done.text
    return open_store(url)


def made(store: Store, iteration: int, name: str) -> Manifest:
    return store.manifest(store.iterations("lora")[iteration].artifacts[name])


def test_each_iteration_makes_an_adapter_of_the_first_policy(store):
    start, first, last = made(store, 0, "policy_in"), made(store, 0, "policy"), made(store, 1, "policy")
    assert base_of(start) is None
    assert base_of(first) == base_of(last) == start.ref
    assert {entry.table for entry in last.files} == {"adapter", "optimizer", "probe", "metrics"}
    second_rollouts = made(store, 1, "rollouts")
    assert second_rollouts.inputs["policy"] == [first.ref]
    assert second_rollouts.inputs["base"] == last.inputs["base"] == [start.ref]
    assert "base" not in made(store, 0, "rollouts").inputs


def test_what_the_engine_sampled_with_the_adapter_the_trainer_sees(store):
    measured = public.scan(made(store, 1, "policy"), "metrics", store=store).collect()
    values = dict(zip(measured["name"], measured["value"], strict=True))
    assert values["sampler_trainer_logprob_diff_max"] < 1e-4
    steps = public.scan(made(store, 1, "rollouts"), "steps", store=store).collect()
    assert set(steps["policy_id"]) == {made(store, 0, "policy").key}


def test_lineage_and_garbage_collection_hold_the_base(store):
    done = rollmill("lineage", "lora:policy", "--store", store.url)
    assert done.code == 0, done.text
    assert str(made(store, 0, "policy_in").ref) in done.out
    collect_garbage(store, grace_s=0, delete=True)
    assert verify(store, made(store, 0, "policy_in")) > 0


def test_a_stage_by_hand_finds_the_base(store, tmp_path):
    url = str(shutil.copytree(store.url, tmp_path / "copy"))
    done = rollmill("stage", "rollouts", "tasks=lora:tasks", "policy=lora:policy", "n=1", "--store", url)
    assert done.code == 0, done.text
    words = ["lora.rank=4", "lora.alpha=16", "optimizer.lr=0.01"]
    done = rollmill("stage", "policy", "advantages=lora:advantages", *words, "--store", url)
    assert done.code == 0, done.text
    copy = open_store(url)
    before, after = (set(shelf.storage.names("artifacts/policy")) for shelf in (store, copy))
    (key,) = after - before
    updated = copy.resolve(f"policy/{key}")
    assert updated.inputs["base"] == [made(store, 0, "policy_in").ref]
    assert updated.inputs["policy"] == [made(store, 0, "policy").ref]


def test_an_adapter_is_evaluated_and_trained_on(store, tmp_path, recipe_of_lora):
    url = str(shutil.copytree(store.url, tmp_path / "copy"))
    words = ["--policy", "lora:policy", "--limit", "3", "rollouts.sampling.max_tokens=4", "run=seen"]
    done = rollmill("eval", "arithmetic", *words, "--store", url)
    assert done.code == 0, done.text
    start = made(store, 0, "policy_in").ref
    assert open_store(url).resolve("seen:rollouts").inputs["base"] == [start]
    goes_on = ["policy={ref: lora:policy}", "run=further", "iterations=1"]
    done = rollmill("train", recipe_of_lora, *goes_on, "--store", url)
    assert done.code == 0, done.text
    assert base_of(open_store(url).resolve("further:policy")) == start
    done = rollmill("train", recipe_of_lora, *goes_on[:1], "run=other", "update.lora.rank=2", "--store", url)
    assert done.code != 0
    assert "is an adapter with rank 4, alpha 16" in done.err
    assert "Traceback" not in done.text
    assert "other" not in open_store(url).runs(), "it was refused before any work"


def test_an_export_is_a_plain_checkpoint_or_the_adapter(store, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    done = rollmill("policy", "export", "lora:policy", tmp_path / "merged", "--store", store.url)
    assert done.code == 0, done.text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for row in public.scan("lora:policy", "probe", store=store).collect().to_dicts():
        ids = torch.tensor([row["ids"]])
        logs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(row["logprobs"], logs.detach().numpy(), atol=1e-5)
    done = rollmill("policy", "import", tmp_path / "merged", "--store", tmp_path / "elsewhere")
    assert done.code == 0, done.text

    done = rollmill("policy", "export", "--adapter", "lora:policy", tmp_path / "adapter", "--store", store.url)
    assert done.code == 0, done.text
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    done = rollmill("policy", "export", "--adapter", "lora@0:policy_in", tmp_path / "none", "--store", store.url)
    assert done.code != 0
    assert "it is no adapter" in done.err
    assert not (tmp_path / "none").exists()


def _is_there(folder: Path, pattern: str) -> bool:
    return any(folder.glob(pattern))


@pytest.mark.slow
def test_killed_and_continued_it_makes_the_same_adapters(store, recipe_of_lora, tmp_path):
    url = tmp_path / "store"
    words = ("train", recipe_of_lora, "run=lora", "--store", url)
    for pattern in ("artifacts/rollouts/*/receipts/*.json", "runs/lora/iterations/00000.json"):
        with background(command(*words), tmp_path / "log", {}, tmp_path) as running:
            running.wait_until(partial(_is_there, url, pattern))
            running.ended_by(signal.SIGKILL)
    done = rollmill(*words)
    assert done.code == 0, done.text
    resumed = open_store(url, writable=False)
    for iteration in range(2):
        tokens = [sampled(shelf, made(shelf, iteration, "rollouts")) for shelf in (store, resumed)]
        assert tokens[0].equals(tokens[1]), f"iteration {iteration}"
        adapters = [
            load_file(shelf.folder(made(shelf, iteration, "policy"), "adapter") / "adapter_model.safetensors")
            for shelf in (store, resumed)
        ]
        for name, tensor in adapters[0].items():
            np.testing.assert_allclose(adapters[1][name], tensor, atol=1e-5)


def sampled(store: Store, rollouts: Manifest) -> pl.DataFrame:
    """Sampled tokens by task and attempt."""
    episodes = public.scan(rollouts, "episodes", store=store).select("episode_id", "task_id", "rollout_index")
    steps = public.scan(rollouts, "steps", store=store).select("episode_id", "response_ids")
    return episodes.join(steps, on="episode_id").sort("task_id", "rollout_index").drop("episode_id").collect()
