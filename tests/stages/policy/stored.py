"""Stored inputs of an update: a tiny policy, rollouts that it could have sampled, rewards and advantages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schemas.artifacts import Manifest
from stages.advantages.stage import STAGE as ADVANTAGES
from stages.artifacts.commit import Request, materialise
from stages.artifacts.store import Store
from stages.policy.settings import TrainerExecution
from stages.policy.stage import STAGE as UPDATE
from stages.policy.stage import PolicyConfig
from stages.policy.tiny import STAGE as INIT
from tests.builders import episode_rows, given, reward_rows, step_rows, stored_tasks, task_rows
from tests.stages.policy.conftest import TINY

EXECUTION = TrainerExecution(threads=1, device="cpu")


def tiny_policy(store: Store, seed: int = 1) -> Manifest:
    """A policy with random weights."""
    return materialise(store, Request(INIT, TINY, INIT.Execution(), {}, seed)).manifest


def rollouts_of(
    store: Store, policy: Manifest, *, n_tasks: int = 3, samples: int = 4, episodes: Any = None, **columns: Any
) -> Manifest:
    """Attempts at the first tasks, with the logprobs that transformers computes for them.

    Args:
        episodes: columns of the episodes by name.
        columns: columns of the steps by name.
    """
    tasks = stored_tasks(store, n_tasks)
    rows = episode_rows([task["task_id"] for task in task_rows(n_tasks)], samples, **(episodes or {}))
    random = np.random.default_rng(3)
    steps = []
    for row in rows:
        response = random.integers(6, 262, size=random.integers(1, 6)).tolist()
        (step,) = step_rows([row["episode_id"]], response_ids=response, policy_id=policy.key)
        prompt = random.integers(6, 262, size=random.integers(2, 9)).tolist()
        steps.append(step | {"prompt_ids": prompt})
    for step, logprobs in zip(steps, _logprobs(store.folder(policy, "checkpoint"), steps), strict=True):
        step.update({"logprobs": logprobs} | columns)
    return given(store, "rollouts", {"episodes": rows, "steps": steps}, inputs={"tasks": [tasks], "policy": [policy]})


def advantages_of(
    store: Store, rollouts: Manifest, rewards: Sequence[float | None] | None = None, estimator: str = "grpo"
) -> Manifest:
    """Advantages of the real stage; without rewards, every second attempt has 1 and the others 0."""
    episodes = store.inputs({"r": [rollouts]}).scan("r", "episodes").collect()["episode_id"].to_list()
    given_rewards = rewards or [float(index % 2) for index in range(len(episodes))]
    scored = given(
        store,
        "rewards",
        {"rewards": reward_rows(episodes, given_rewards), "signals": [], "step_rewards": []},
        inputs={"rollouts": [rollouts]},
    )
    config = ADVANTAGES.Config.model_validate({"estimator": estimator})
    inputs = {"rollouts": [rollouts], "rewards": [scored]}
    return materialise(store, Request(ADVANTAGES, config, ADVANTAGES.Execution(), inputs)).manifest


def updated(
    store: Store,
    policy: Manifest,
    rollouts: Manifest,
    advantages: Manifest,
    *,
    execution: TrainerExecution = EXECUTION,
    reference: Manifest | None = None,
    base: Manifest | None = None,
    **config: Any,
) -> Manifest:
    """The policy after one update."""
    settings = PolicyConfig.model_validate({"optimizer": {"lr": 1e-3}} | config)
    inputs = {"policy": [policy], "rollouts": [rollouts], "advantages": [advantages]}
    if base is not None:
        inputs["base"] = [base]
    if reference is not None:
        inputs["reference"] = [reference]
    return materialise(store, Request(UPDATE, settings, execution, inputs)).manifest


def metrics_of(store: Store, policy: Manifest) -> dict[str, float]:
    """Its measurements by name."""
    rows = store.inputs({"p": [policy]}).scan("p", "metrics").collect()
    return dict(zip(rows["name"].to_list(), rows["value"].to_list(), strict=True))


def weights_of(store: Store, policy: Manifest) -> dict[str, np.ndarray]:
    """Its weights by name; of an adapter, its own."""
    from safetensors.numpy import load_file

    if policy.table_files("adapter"):
        return load_file(store.folder(policy, "adapter") / "adapter_model.safetensors")
    return load_file(store.folder(policy, "checkpoint") / "model.safetensors")


def contents_of(policy: Manifest) -> dict[str, str]:
    """Checksums of the files of checkpoint or adapter, and optimizer, by name."""
    return {f"{f.table}/{f.name}": f.sha256 for f in policy.files if f.rows is None}


def _logprobs(folder: Path, steps: list[dict[str, Any]]) -> list[list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for step in steps:
        ids = step["prompt_ids"] + step["response_ids"]
        with torch.no_grad():
            logs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        first = len(step["prompt_ids"])
        found.append([logs[place - 1, ids[place]].item() for place in range(first, len(ids))])
    return found
