"""The stages by name, imported when asked for, so that naming them costs nothing."""

from importlib import import_module
from typing import Any

from schemas.config import nearest
from schemas.errors import NotFoundError
from stages.artifacts.stage import Stage

_MODULES = {
    "tasks": "stages.tasks.stage",
    "rollouts": "stages.rollouts.stage",
    "rewards": "stages.rewards.stage",
    "advantages": "stages.advantages.stage",
    "policy": "stages.policy.stage",
    "policy_import": "stages.policy.importing",
    "policy_init": "stages.policy.tiny",
    "policy_warmstart": "stages.policy.warmstart",
    "report": "stages.report.stage",
}

STAGE_NAMES = tuple(_MODULES)


def stage_named(name: str) -> Stage[Any, Any]:
    """The stage called ``name``.

    Raises:
        NotFoundError: with the nearest known name.
    """
    if name not in _MODULES:
        raise NotFoundError(f"unknown stage {name!r}", hint=nearest(name, list(STAGE_NAMES)))
    stage: Stage[Any, Any] = import_module(_MODULES[name]).STAGE
    return stage
