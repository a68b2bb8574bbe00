"""Agents by name: those that are built in (``patterns``), and the user's."""

import inspect
from collections.abc import Callable
from typing import Any

from schemas.config import nearest, validated
from schemas.errors import ConfigError, InputError
from schemas.loading import code_version, is_user_code, load_object
from schemas.records import Task
from stages.rollouts.patterns import PATTERNS
from stages.rollouts.sdk import Agent, Messages

AGENTS: dict[str, Agent] = {name: pattern.agent for name, pattern in PATTERNS.items()}


def check_settings(name: str, agent_config: dict[str, Any]) -> None:
    """Refuses settings that a built-in agent does not know.

    Raises:
        ConfigError: with each wrong setting and the nearest known one.
    """
    if name in PATTERNS:
        validated(PATTERNS[name].Config, agent_config, f"agent_config of the agent {name!r}")


def first_messages(name: str) -> Callable[[Task, dict[str, Any]], Messages] | None:
    """What an agent asks first; None where that cannot be told before it runs."""
    return PATTERNS[name].first_messages if name in PATTERNS else None


def agent_named(name: str) -> Agent:
    """The built-in agent of that name, or the user's ``module:function`` or ``path/file.py:function``.

    Raises:
        ConfigError: there is no built-in agent of that name; with the nearest.
        NotFoundError: no such module, file or function.
        InputError: it is not a function of a task and a config.
    """
    if not is_user_code(name):
        if name not in AGENTS:
            raise ConfigError(f"unknown agent {name!r}", hint=nearest(name, list(AGENTS)))
        return AGENTS[name]
    found = load_object(name, "agent")
    agent = found if isinstance(found, Agent) else Agent(found) if inspect.isroutine(found) else None
    if agent is None:
        raise InputError(f"agent {name!r} is a {type(found).__name__}, and not a function of (task, config)")
    try:
        inspect.signature(agent.function).bind(None, None)
    except TypeError:
        raise InputError(f"agent {name!r} does not take the two arguments (task, config)") from None
    return agent


def agent_version(name: str) -> str:
    """Version of an agent's code, for the key; the stage's own version covers the built-in ones."""
    agent_named(name)
    return code_version(name, "agent") if is_user_code(name) else "built-in"
