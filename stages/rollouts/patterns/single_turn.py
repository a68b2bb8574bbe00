"""Asks once and takes the answer."""

from typing import Any

from schemas.records import Task
from stages.rollouts.patterns.base import Pattern, PatternConfig
from stages.rollouts.sdk import AgentConfig, Messages, rollout


class SingleTurnConfig(PatternConfig):
    """Settings of ``single_turn``."""


@rollout
async def single_turn(task: Task, config: AgentConfig) -> None:
    """The policy's answer is the trajectory."""
    await config.chat(_first(task, config.metadata))


def _first(task: Task, agent_config: dict[str, Any]) -> Messages:
    return SingleTurnConfig.model_validate(agent_config).opening(task.instruction)


PATTERN = Pattern(single_turn, SingleTurnConfig, _first)
