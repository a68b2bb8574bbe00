"""Configs: what is unknown or out of bounds is refused, with the nearest known name."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from schemas.config import ConfigModel, nearest, validated
from schemas.errors import ConfigError


class Grpo(ConfigModel):
    name: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=1e-6, gt=0)


class Best(ConfigModel):
    name: Literal["best"] = "best"
    threshold: float = 0.5


class Recipe(ConfigModel):
    learning_rate: float = Field(default=1e-4, gt=0)
    """Step size."""
    temperature: float = 1.0
    estimator: Annotated[Grpo | Best, Field(discriminator="name")] = Grpo()
    stages: dict[str, Grpo] = Field(default_factory=dict)
    many: list[Grpo] = Field(default_factory=list)


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validated(Recipe, values, "recipe.yaml")
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_good_values_make_a_model() -> None:
    recipe = validated(Recipe, {"learning_rate": 2, "estimator": {"name": "best"}}, "recipe.yaml")
    assert (recipe.learning_rate, recipe.estimator) == (2.0, Best())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"learnin_rate": 1}, "recipe.yaml: unknown key 'learnin_rate': did you mean 'learning_rate'?"),
        ({"estimator": {"name": "grpo", "epsilom": 1}}, "did you mean 'epsilon'?"),
        ({"estimator": {"name": "best", "treshold": 1}}, "did you mean 'threshold'?"),
        ({"stages": {"a": {"epsilom": 1}}}, "unknown key 'stages.a.epsilom': did you mean 'epsilon'?"),
        ({"many": [{"epsilom": 1}]}, "unknown key 'many.0.epsilom': did you mean 'epsilon'?"),
        ({"zzz": 1}, "known: estimator, learning_rate, many, stages, temperature"),
        ({"learning_rate": 0}, "learning_rate: Input should be greater than 0 (got 0)"),
        ({"learning_rate": "fast"}, "learning_rate: Input should be a valid number"),
        ({"estimator": {"name": "gppo"}}, "'grpo', 'best'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_right(values: dict[str, Any], said: str) -> None:
    assert said in refused(values)


def test_every_wrong_setting_is_listed_at_once() -> None:
    message = refused({"learning_rate": -1, "temperature": "x", "tempreature": 1})
    assert [name in message for name in ("learning_rate:", "temperature:", "'tempreature'")] == [True] * 3


def test_a_long_value_is_not_repeated() -> None:
    assert "aaaa" not in refused({"learning_rate": "a" * 500})


def test_a_model_is_frozen_and_keeps_its_docstrings() -> None:
    with pytest.raises(ValidationError):
        Recipe().learning_rate = 1.0
    assert Recipe.model_fields["learning_rate"].description == "Step size."


def test_the_nearest_name_is_suggested_where_there_is_one() -> None:
    assert nearest("stpes", ["steps", "tasks"]) == "did you mean 'steps'? (known: steps, tasks)"
    assert nearest("xxx", ["steps", "tasks"]) == "known: steps, tasks"
