"""Recipes resolved: all that one names outside of the store (files, agents, graders, policies) is looked at.

So a mistake is refused before anything is written. Knows nothing of Prefect: a finished run answers at once.
"""

from typing import TypeVar

from flows.recipes import Execution, Recipe, StartingPolicy
from flows.registry import stage_named
from schemas.config import ConfigModel
from stages.artifacts.store import Store
from stages.policy.importing import ImportExecution

_SECTIONS = {"rollouts": "rollouts", "rewards": "rewards", "advantages": "advantages", "update": "policy"}
"""Section of a recipe: the stage that it configures."""

RecipeT = TypeVar("RecipeT", bound=Recipe)


def resolve(store: Store, recipe: RecipeT) -> RecipeT:
    """``recipe`` with every section resolved; nothing is written.

    Raises:
        RollmillError: for the first thing that does not exist or cannot be used.
    """
    how = recipe.execution
    changed: dict[str, ConfigModel] = {
        "tasks": _resolved("tasks", recipe.tasks, how.tasks),
        "policy": _resolved_policy(store, recipe.policy, how),
    }
    for section, stage in _SECTIONS.items():
        if section in type(recipe).model_fields:
            changed[section] = _resolved(stage, getattr(recipe, section), getattr(how, stage))
    return recipe.model_copy(update=changed)


def _resolved(stage: str, config: ConfigModel, execution: ConfigModel) -> ConfigModel:
    resolved: ConfigModel = stage_named(stage).resolve(config, execution)
    return resolved


def _resolved_policy(store: Store, start: StartingPolicy, how: Execution) -> StartingPolicy:
    changed: dict[str, ConfigModel] = {}
    if start.ref is not None:
        store.resolve(start.ref, kind="policy")
    if start.source is not None:
        changed["imported"] = _resolved("policy_import", start.imported, ImportExecution(location=start.source))
    if start.warmstart is not None:
        tasks = _resolved("tasks", start.warmstart.tasks, how.tasks)
        changed["warmstart"] = start.warmstart.model_copy(update={"tasks": tasks})
    return start.model_copy(update=changed)
