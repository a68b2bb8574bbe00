"""What ``train`` and ``evaluate`` are told: one section a stage, and apart from it how to execute them.

``execution`` never changes a result and never enters a key; everything else does.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from flows.engine_block import split_recipe
from flows.loading import load_config, read_yaml, with_overrides
from schemas.config import ConfigModel, nearest, validated
from schemas.errors import NotFoundError
from stages.advantages.estimators import ESTIMATORS
from stages.advantages.stage import AdvantagesConfig, AdvantagesExecution
from stages.policy.importing import ImportConfig
from stages.policy.settings import TrainerExecution
from stages.policy.stage import PolicyConfig
from stages.policy.tiny import InitConfig
from stages.policy.warmstart import WarmstartConfig
from stages.report.stage import ReportConfig, ReportExecution
from stages.rewards.stage import RewardsConfig, RewardsExecution
from stages.rollouts.endpoints.settings import EndpointConfig
from stages.rollouts.stage import RolloutsConfig, RolloutsExecution
from stages.tasks.stage import TasksConfig, TasksExecution

FOLDER = Path(__file__).resolve().parents[1] / "configs"


class Warmstart(ConfigModel):
    """Supervised training before the first iteration."""

    tasks: TasksConfig
    """Tasks with answers, from which the policy learns to answer."""
    training: WarmstartConfig = WarmstartConfig()


class StartingPolicy(ConfigModel):
    """The policy that the first iteration samples with: exactly one of ``new``, ``source`` and ``ref``."""

    new: InitConfig | None = None
    """A small policy with random weights."""
    source: str | None = None
    """A Hugging Face folder (local, or a URL such as ``s3://…``), a GGUF file, or ``hf://org/name@revision``."""
    imported: ImportConfig = ImportConfig()
    """How ``source`` is read."""
    ref: str | None = None
    """A policy of the store: ``policy/KEY`` or ``RUN:policy``."""
    warmstart: Warmstart | None = None
    """None: it is taken as it is."""

    @model_validator(mode="after")
    def _one_of_three(self) -> "StartingPolicy":
        given = [name for name in ("new", "source", "ref") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of new, source and ref (given: {', '.join(given) or 'none'})")
        return self


class Execution(ConfigModel):
    """How the work is done; no result depends on it."""

    store: str = "./store"
    """Folder or URL of the store."""
    single_writer: bool = False
    """You vouch that one process at a time writes to the store: accepts storage without exclusive creation."""
    shards_at_once: int = Field(default=4, ge=1)
    """Shards of a stage that are worked on at the same time in this process."""
    tasks: TasksExecution = TasksExecution()
    rollouts: RolloutsExecution = RolloutsExecution()
    rewards: RewardsExecution = RewardsExecution()
    advantages: AdvantagesExecution = AdvantagesExecution()
    policy: TrainerExecution = TrainerExecution()
    """Of the update and of the warm start."""
    report: ReportExecution = ReportExecution()


class Recipe(ConfigModel):
    """What both flows are told."""

    run: str | None = None
    """Name of the run, a folder in the store. None: the recipe's file name and a hash of its settings."""
    seed: int = Field(default=0, ge=0)
    """Everything random derives from it."""
    policy: StartingPolicy | None = None
    """None: a model that others serve answers, ``rollouts.engine.type=endpoint``."""
    tasks: TasksConfig
    rollouts: RolloutsConfig = RolloutsConfig()
    rewards: RewardsConfig = RewardsConfig()
    report: ReportConfig = ReportConfig()
    execution: Execution = Execution()

    @model_validator(mode="after")
    def _one_model(self) -> "Recipe":
        is_endpoint = isinstance(self.rollouts.engine, EndpointConfig)
        if self.policy is None and not is_endpoint:
            raise ValueError("policy is missing: give one of policy.new, policy.source and policy.ref")
        if self.policy is not None and is_endpoint:
            raise ValueError("rollouts.engine.type=endpoint asks a model that others serve: leave policy out")
        return self

    def identity(self) -> dict[str, Any]:
        """What determines the results, as plain JSON: the recipe without its name and its execution."""
        return self.model_dump(mode="json", exclude={"run", "execution"})


class TrainRecipe(Recipe):
    """What ``train`` is told."""

    iterations: int = Field(ge=1)
    """Passes of rollouts, rewards, advantages and update."""
    overlap: int = Field(default=0, ge=0, le=1)
    """1: while an iteration is scored and trained, the next one is sampled with the policy that this one began with;
    the update corrects for it, since its ratios are against the logprobs of the policy that sampled. 0: one after the
    other."""
    advantages: AdvantagesConfig = AdvantagesConfig()
    update: PolicyConfig = PolicyConfig()
    """The policy update."""

    @model_validator(mode="after")
    def _has_a_policy(self) -> "TrainRecipe":
        if self.policy is None:
            raise ValueError(
                "rollouts.engine.type=endpoint gives no token ids and no logprobs, so nothing can be trained on them; "
                "rollmill eval can use it"
            )
        return self

    @model_validator(mode="after")
    def _gate_compares_one_policy(self) -> "TrainRecipe":
        if self.overlap and self.update.gate is not None:
            raise ValueError(
                "update.gate compares sampler and trainer under one policy, and with overlap they have two"
            )
        return self

    @model_validator(mode="after")
    def _one_objective(self) -> "TrainRecipe":
        made_for = ESTIMATORS[self.advantages.estimator].objective
        if made_for != self.update.objective:
            raise ValueError(
                f"the estimator {self.advantages.estimator} makes advantages for the objective {made_for}, and "
                f"update.objective is {self.update.objective}: set update.objective={made_for}, or another estimator"
            )
        return self


class EvaluateRecipe(Recipe):
    """What ``evaluate`` is told."""


def load_recipe(
    model: type[Recipe], recipe: str | dict[str, Any], overrides: list[str], store: str | None = None
) -> tuple[Any, str]:
    """A recipe and the label from which its run is named.

    Args:
        recipe: a YAML file, the name of one in ``configs``, or the settings themselves.
        overrides: ``dotted.key=value``.
        store: replaces ``execution.store``; None leaves it.
    Raises:
        NotFoundError, ConfigError: with the file, the key and the nearest known one.
    """
    if store is not None:
        overrides = [*overrides, f"execution.store={store}"]
    if isinstance(recipe, dict):
        label = model.__name__.removesuffix("Recipe").lower()
        return validated(model, split_recipe(with_overrides(recipe, overrides)), "recipe"), label
    path = _file(recipe)
    return load_config(model, path, overrides, arranged=split_recipe), path.stem


def recipe_settings(name: str) -> dict[str, Any]:
    """The settings of a recipe file as they stand there."""
    return read_yaml(_file(name))


def _file(name: str) -> Path:
    shipped = FOLDER / f"{name}.yaml"
    if Path(name).exists() or not shipped.exists():
        if not Path(name).exists() and "/" not in name and not name.endswith((".yaml", ".yml")):
            known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
            raise NotFoundError(f"there is no recipe {name!r}", hint=nearest(name, known))
        return Path(name)
    return shipped
