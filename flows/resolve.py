"""Recipes resolved: all that one names outside of the store (files, agents, graders, policies) is looked at.

So a mistake is refused before anything is written. Knows nothing of Prefect: a finished run answers at once.
"""

from typing import TypeVar

from flows.policies import policy_inputs, with_known_roles
from flows.recipes import Execution, Recipe, StartingPolicy, TrainRecipe
from flows.registry import stage_named
from schemas.config import ConfigModel, nearest
from schemas.errors import ConfigError, NotFoundError
from stages.artifacts import commit
from stages.artifacts.store import Store
from stages.policy.importing import ImportExecution
from stages.policy.lora import check_lora
from stages.rewards.graders import GRADERS
from stages.rollouts.agents import AGENTS
from stages.rollouts.config import RolloutsConfig
from stages.tasks.stage import TasksConfig, TasksExecution

_SECTIONS = {"rollouts": "rollouts", "rewards": "rewards", "advantages": "advantages", "update": "policy"}
"""Section of a recipe: the stage that it configures."""

_READ: set[str] = set()
"""Keys of tasks whose source this process has found to be good."""

RecipeT = TypeVar("RecipeT", bound=Recipe)


def resolve(store: Store, recipe: RecipeT) -> RecipeT:
    """``recipe`` with every section resolved; nothing is written.

    Raises:
        RollmillError: for the first thing that does not exist or cannot be used.
    """
    how = recipe.execution
    tasks = _resolved_tasks(store, recipe.tasks, how.tasks)
    _refuse_names_in_tasks(recipe, tasks)
    changed: dict[str, ConfigModel] = {"tasks": tasks}
    if recipe.policy is not None:
        changed["policy"] = _resolved_policy(store, recipe.policy, how)
    if isinstance(recipe, TrainRecipe) and recipe.policy is not None and recipe.policy.ref is not None:
        start = store.resolve(recipe.policy.ref, kind="policy")
        check_lora(store.inputs(policy_inputs(store, start)), recipe.update.lora)
    for section, stage in _SECTIONS.items():
        if section in type(recipe).model_fields:
            changed[section] = _resolved(stage, getattr(recipe, section), getattr(how, stage))
    rollouts = changed["rollouts"]
    assert isinstance(rollouts, RolloutsConfig)
    changed["rollouts"] = with_known_roles(store, rollouts)
    return recipe.model_copy(update=changed)


def _resolved(stage: str, config: ConfigModel, execution: ConfigModel) -> ConfigModel:
    resolved: ConfigModel = stage_named(stage).resolve(config, execution)
    return resolved


def _resolved_tasks(store: Store, config: TasksConfig, execution: TasksExecution) -> TasksConfig:
    """The source is read once where these tasks are not on the shelf yet: a bad row is refused now."""
    stage = stage_named("tasks")
    resolved: TasksConfig = stage.resolve(config, execution)
    request = commit.Request(stage, resolved, execution)
    if request.key not in _READ and commit.lookup(store, request) is None:
        stage.check(store.inputs({}), resolved, execution)
        _READ.add(request.key)
    return resolved


def _refuse_names_in_tasks(recipe: Recipe, tasks: TasksConfig) -> None:
    """Where the recipe names no grader or agent, the tasks do; data may name built-in ones only."""
    if recipe.rewards.grader is None and tasks.grader is None:
        raise ConfigError(
            "nothing names a grader: neither rewards.grader nor the tasks", hint="set rewards.grader=NAME"
        )
    named = (("grader", recipe.rewards.grader, GRADERS), ("agent", recipe.rollouts.agent, AGENTS))
    for what, chosen, known in named:
        name = getattr(tasks, what)
        if chosen is None and name is not None and name not in known:
            section = "rewards" if what == "grader" else "rollouts"
            raise NotFoundError(
                f"the tasks ask for the {what} {name!r}, which is not built in: {nearest(name, list(known))}",
                hint=f"name one for all tasks: {section}.{what}=NAME",
            )


def _resolved_policy(store: Store, start: StartingPolicy, how: Execution) -> StartingPolicy:
    changed: dict[str, ConfigModel | str] = {}
    if start.ref is not None:  # a run's last policy is another one tomorrow
        changed["ref"] = f"policy/{store.resolve(start.ref, kind='policy').key}"
    if start.source is not None:
        changed["imported"] = _resolved("policy_import", start.imported, ImportExecution(location=start.source))
    if start.warmstart is not None:
        tasks = _resolved_tasks(store, start.warmstart.tasks, how.tasks)
        changed["warmstart"] = start.warmstart.model_copy(update={"tasks": tasks})
    return start.model_copy(update=changed)
