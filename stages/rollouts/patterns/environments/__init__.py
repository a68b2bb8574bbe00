"""The text environments by name. A new one is a file beside these and a line here."""

from typing import Any

from schemas.config import nearest, validated
from schemas.errors import ConfigError
from stages.rollouts.patterns.environments.base import TextEnvironment
from stages.rollouts.patterns.environments.frozen_lake import FrozenLake
from stages.rollouts.patterns.environments.gym import Gym
from stages.rollouts.patterns.environments.sokoban import Sokoban

ENVIRONMENTS: dict[str, type[TextEnvironment]] = {"frozen_lake": FrozenLake, "sokoban": Sokoban, "gymnasium": Gym}


def environment_named(name: str, params: dict[str, Any]) -> TextEnvironment:
    """An environment, ready for ``reset``.

    Raises:
        ConfigError: no such environment, or parameters that it does not take.
    """
    if name not in ENVIRONMENTS:
        raise ConfigError(f"unknown environment {name!r}", hint=nearest(name, list(ENVIRONMENTS)))
    kind = ENVIRONMENTS[name]
    return kind(validated(kind.Config, params, f"params of the environment {name!r}"))
