"""What a pattern is: a built-in agent, its settings, and what it asks first.

The settings stand in ``rollouts.agent_config``; the stage refuses unknown ones before any work.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator

from schemas.config import ConfigModel
from schemas.records import Task
from stages.rollouts.sdk import Agent, Messages


def placeholders(*needed: str, optional: str | None = None) -> AfterValidator:
    """Of a setting that is a template: a text with these names in braces, and no others.

    Args:
        needed: names that every template must hold.
        optional: a name that it may hold besides.
    """
    allowed = {*needed, *filter(None, [optional])}

    def check(template: str) -> str:
        try:
            used = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise ValueError(f"{template!r} is not a template ({error}); write {{{{ and }}}} for braces") from None
        if not set(needed) <= used <= allowed:
            must, may = (", ".join(f"{{{name}}}" for name in sorted(names)) for names in (needed, allowed))
            raise ValueError(f"{template!r} must hold {must}, and may hold {may} and nothing else in braces")
        return template

    return AfterValidator(check)


class PatternConfig(ConfigModel):
    """Settings that every pattern has."""

    system: str | None = None
    """Text of a system message, put before each conversation. None: there is none."""

    def opening(self, content: str | list[dict[str, Any]]) -> Messages:
        """The first messages of a conversation that begins with ``content``."""
        messages: Messages = [{"role": "user", "content": content}]
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages


@dataclass(frozen=True)
class Pattern:
    """A built-in agent."""

    agent: Agent
    Config: type[PatternConfig]
    """What its ``agent_config`` may hold."""
    first_messages: Callable[[Task, dict[str, Any]], Messages] | None = None
    """What it asks first; None: that cannot be told before it runs."""


def text_of(instruction: str | list[dict[str, Any]]) -> str:
    """An instruction as text, for prompts that have it in their middle; parts that are no text are left out."""
    if isinstance(instruction, str):
        return instruction
    return "\n".join(part["text"] for part in instruction if part.get("type") == "text")
