"""Agents by name: those that are built in (``patterns``), and the user's."""

import hashlib
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.canonical import canonical_hash
from schemas.config import nearest, validated
from schemas.errors import ConfigError, InputError, NotFoundError
from schemas.loading import code_version, is_user_code, load_object
from schemas.records import Task
from stages.rollouts.commands import CommandAgent, command_agent
from stages.rollouts.patterns import PATTERNS
from stages.rollouts.sdk import Agent, Messages

AGENTS: dict[str, Agent] = {name: pattern.agent for name, pattern in PATTERNS.items()}


def check_settings(name: str | CommandAgent, agent_config: dict[str, Any]) -> None:
    """Refuses settings that a built-in agent does not know.

    Raises:
        ConfigError: with each wrong setting and the nearest known one.
    """
    if isinstance(name, str) and name in PATTERNS:
        validated(PATTERNS[name].Config, agent_config, f"agent_config of the agent {name!r}")


def first_messages(name: str | CommandAgent) -> Callable[[Task, dict[str, Any]], Messages] | None:
    """What an agent asks first; None where that cannot be told before it runs."""
    return PATTERNS[name].first_messages if isinstance(name, str) and name in PATTERNS else None


def agent_named(name: str | CommandAgent) -> Agent:
    """The built-in agent of that name, the user's ``module:function`` or ``path/file.py:function``, or a program.

    Raises:
        ConfigError: there is no built-in agent of that name; with the nearest.
        NotFoundError: no such module, file, function or program.
        InputError: it is not a function of a task and a config.
    """
    if isinstance(name, CommandAgent):
        if shutil.which(name.command[0]) is None:
            raise NotFoundError(f"agent.command: there is no program {name.command[0]!r}")
        return command_agent(name)
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


def agent_label(name: str | CommandAgent) -> str:
    """What the ``episodes`` table calls it."""
    return name if isinstance(name, str) else f"command {Path(name.command[0]).name}"


def agent_version(name: str | CommandAgent) -> str:
    """Version of an agent's code, for the key; the stage's own version covers the built-in ones.

    A program's is of the files that its command names, such as a script's; what these use takes no part in it.
    """
    agent_named(name)
    if isinstance(name, CommandAgent):
        files = [Path(word) for word in name.command if "/" in word or "." in word]
        contents = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
        return canonical_hash(contents)[:12]
    return code_version(name, "agent") if is_user_code(name) else "built-in"
