from typing import Any

import pytest

from schemas.artifacts import Manifest
from schemas.config import validated
from schemas.errors import ConfigError, InputError
from stages.artifacts.commit import Request, materialise
from stages.artifacts.store import Store
from stages.policy.chats import taught_chats
from stages.policy.warmstart import STAGE, WarmstartConfig
from tests.builders import given, stored_tasks, task_rows
from tests.stages.policy.stored import EXECUTION, contents_of, metrics_of, tiny_policy


def warmed(store: Store, policy: Manifest, tasks: Manifest, seed: int = 0, **config: object) -> Manifest:
    settings = WarmstartConfig.model_validate({"tokens_per_step": 200, "steps": 3} | config)
    inputs = {"policy": [policy], "tasks": [tasks]}
    return materialise(store, Request(STAGE, settings, EXECUTION, inputs, seed)).manifest


def test_answers_and_their_end_are_learnt_and_prompts_are_not(store: Store) -> None:
    from transformers import AutoTokenizer

    policy, tasks = tiny_policy(store), stored_tasks(store, 2)
    chats = taught_chats(store.inputs({"policy": [policy], "tasks": [tasks]}), "Sums.", ["{answer}", "={answer}."])
    tokenizer: Any = AutoTokenizer.from_pretrained(store.folder(policy, "checkpoint"))
    learnt, start = [], 0
    for length in chats.lengths_S:
        ids, sampled = chats.ids_T[start:][:length], chats.sampled_T[start:][:length]
        assert tokenizer.decode(ids[~sampled]).startswith("<|system|>Sums.<|end|><|user|>What is ")
        assert tokenizer.decode(ids[~sampled]).endswith("?<|end|><|assistant|>")
        learnt.append(tokenizer.decode(ids[sampled]))
        start += length
    assert learnt == ["0<|end|>", "=0.<|end|>", "2<|end|>", "=2.<|end|>"]


def test_it_learns_what_it_is_taught(store: Store) -> None:
    policy, tasks = tiny_policy(store), stored_tasks(store, 4)
    once, often = (metrics_of(store, warmed(store, policy, tasks, steps=steps)) for steps in (1, 60))
    assert once["loss"] > 4
    assert often["loss"] < 0.6 * once["loss"]
    assert often["examples"] == 4
    assert often["optimizer_steps"] == 60


def test_the_seed_is_the_order_of_the_examples(store: Store) -> None:
    policy, tasks = tiny_policy(store), stored_tasks(store, 20)
    weights = [contents_of(warmed(store, policy, tasks, seed, steps=2)) for seed in (0, 1)]
    again = contents_of(warmed(store, policy, tasks, 0, steps=2, system=None))
    assert weights[0] == again != weights[1]


def test_the_next_stage_begins_with_an_optimizer_of_its_own(store: Store) -> None:
    made = warmed(store, tiny_policy(store), stored_tasks(store))
    assert not made.table_files("optimizer")


def test_tasks_without_an_answer_are_refused_before_anything_is_written(store: Store) -> None:
    tasks = given(store, "tasks", {"tasks": [task_rows(1)[0] | {"answer": None}]})
    with pytest.raises(InputError, match="t000"):
        warmed(store, tiny_policy(store), tasks)
    assert not store.storage.exists("artifacts/policy_warmstart")


def test_a_form_without_the_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'it is' lacks \{answer\}"):
        validated(WarmstartConfig, {"answer_forms": ["it is"]}, "warmstart")
