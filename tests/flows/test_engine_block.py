"""The engine's settings may stand in one block; what changes no sample is executed and enters no key."""

from pathlib import Path

import pytest
import yaml

from flows.call import stage_request
from flows.recipes import EvaluateRecipe, load_recipe
from schemas.errors import ConfigError
from tests.builders import stored_policy, stored_tasks

BLOCK = {
    "type": "vllm",
    "workers": ["http://127.0.0.1:8000"],
    "python": "/opt/vllm/bin/python",
    "tensor_parallel": 2,
    "dtype": "float32",
    "args": {"max_model_len": 128, "gpu_memory_utilization": 0.8},
}
RECIPE = {"policy": {"new": {}}, "tasks": {"benchmark": "arithmetic"}}


def recipe_with(engine: dict, execution: dict | None = None, overrides: list[str] | None = None) -> EvaluateRecipe:
    how = {} if execution is None else {"execution": {"rollouts": {"vllm": execution}}}
    return load_recipe(EvaluateRecipe, {**RECIPE, "rollouts": {"engine": engine}, **how}, overrides or [])[0]


def test_each_setting_of_the_block_goes_where_it_belongs(tmp_path: Path):
    recipe = recipe_with(BLOCK)
    engine, how = recipe.rollouts.engine, recipe.execution.rollouts.vllm
    assert engine.model_dump() == {"type": "vllm", "dtype": "float32", "args": {"max_model_len": 128}}
    assert how.workers == ["http://127.0.0.1:8000"]
    assert (how.python, how.tensor_parallel, how.args) == ("/opt/vllm/bin/python", 2, {"gpu_memory_utilization": 0.8})
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, "rollouts": {"engine": BLOCK}}))
    assert load_recipe(EvaluateRecipe, str(file), [])[0] == recipe


def test_overrides_of_the_block_count_too():
    recipe = recipe_with(
        {"type": "vllm"}, overrides=["rollouts.engine.workers=3", "rollouts.engine.args.max_num_seqs=8"]
    )
    assert recipe.execution.rollouts.vllm.workers == 3
    assert recipe.execution.rollouts.vllm.args == {"max_num_seqs": 8}


def test_results_do_not_depend_on_where_it_is_set_nor_on_what_changes_no_sample(memory_store):
    inputs = {
        "tasks": str(stored_tasks(memory_store).ref),
        "policy": str(stored_policy(memory_store).ref),
    }

    def key(engine: dict, execution: dict) -> str:
        config = {"engine": engine}
        return stage_request(memory_store, "rollouts", inputs=inputs, config=config, execution=execution).key

    assert key({"type": "vllm", "workers": 2}, {}) == key({"type": "vllm"}, {"vllm": {"workers": 4}})
    assert key({"type": "vllm", "args": {"max_num_seqs": 8}}, {}) == key({"type": "vllm"}, {})
    assert key({"type": "vllm", "args": {"max_model_len": 64}}, {}) != key({"type": "vllm"}, {})


@pytest.mark.parametrize(
    ("engine", "execution", "told"),
    [
        ({"type": "vllm", "workers": 2}, {"workers": 3}, "rollouts.engine.workers is 2, and execution"),
        (
            {"type": "vllm", "args": {"max_num_seqs": 8}},
            {"args": {"max_num_seqs": 9}},
            "rollouts.engine.args.max_num_seqs is 8",
        ),
        ({"type": "vllm", "worker": 2}, {}, "worker"),
        ({"type": "vllm", "workers": 0}, {}, "there must be one worker at least"),
        ({"type": "transformers", "workers": 2}, {}, "workers"),
    ],
)
def test_contradictions_and_mistakes_are_refused(engine, execution, told):
    with pytest.raises(ConfigError, match=told):
        recipe_with(engine, execution)


def test_the_same_value_in_both_places_is_no_contradiction():
    assert recipe_with({"type": "vllm", "workers": 2}, {"workers": 2}).execution.rollouts.vllm.workers == 2


def test_a_misspelt_setting_of_the_block_is_named_with_the_nearest_of_both_places():
    with pytest.raises(ConfigError, match=r"unknown key 'rollouts.engine.worker'\ndid you mean 'workers'"):
        recipe_with({"type": "vllm", "worker": 2})
