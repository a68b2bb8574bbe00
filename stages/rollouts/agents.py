"""Agents by name, and those that are built in."""

import inspect
from collections.abc import Callable
from typing import Any

from schemas.config import nearest
from schemas.errors import ConfigError, InputError
from schemas.loading import code_version, is_user_code, load_object
from schemas.records import Task
from stages.rollouts.sdk import Agent, AgentConfig, Messages, rollout


@rollout
async def single_turn(task: Task, config: AgentConfig) -> None:
    """Asks once and takes the answer. ``agent_config``: ``system``, the text of a system message."""
    await config.chat(single_turn_messages(task, config.metadata))


def single_turn_messages(task: Task, agent_config: dict[str, Any]) -> Messages:
    """What ``single_turn`` asks."""
    messages: Messages = [{"role": "user", "content": task.instruction}]
    if agent_config.get("system"):
        messages.insert(0, {"role": "system", "content": agent_config["system"]})
    return messages


AGENTS: dict[str, Agent] = {"single_turn": single_turn}
SETTINGS: dict[str, set[str]] = {"single_turn": {"system"}}
"""The keys of ``agent_config`` that each built-in agent knows."""
FIRST_MESSAGES: dict[str, Callable[[Task, dict[str, Any]], Messages]] = {"single_turn": single_turn_messages}
"""What a built-in agent asks first, where that can be told before it runs."""


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
