"""Plays a text environment: what is to be seen goes to the policy, its answer is the action, until the game is over.

An answer that names no action costs a turn. What the environment pays is the trajectory's reward, which the
grader ``agent`` hands on.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from schemas.config import nearest, validated
from schemas.errors import InputError
from schemas.records import Episode, Task, Trajectory
from stages.rollouts.patterns.base import Pattern, PatternConfig, text_of
from stages.rollouts.patterns.environments import ENVIRONMENTS, environment_named
from stages.rollouts.patterns.environments.base import TextEnvironment
from stages.rollouts.sdk import AgentConfig, MaxTurnsReached, Messages, rollout

Found = TypeVar("Found")


class EnvironmentConfig(PatternConfig):
    """Settings of ``environment``."""

    environment: str | None = None
    """frozen_lake, sokoban or gymnasium. None: what each task's metadata names as ``environment``, which may be
    frozen_lake or sokoban (task data does not choose code)."""
    params: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Parameters of the environment. Where ``environment`` is None: added to those that the task's metadata names as
    ``params``, and stronger than they."""
    turns: int = Field(default=20, ge=1, le=10_000)
    """Answers at most, those that name no action included; then the game is over."""
    history: int | None = Field(default=None, ge=0)
    """Past turns that the policy sees besides what is to be seen now. None: all, as one conversation; 0: none, for
    environments that show all that matters."""
    rules: str | None = None
    """What the first message says of the rules. None: the environment's own words; empty: nothing."""
    show_instruction: bool = True
    """Whether the first message begins with the task's instruction."""
    error: str = "That is no action."
    """Said before what is to be seen, when an answer named no action."""
    error_reward: float = Field(default=0.0, ge=-10, le=0)
    """Added to the reward for each answer that names no action."""

    @field_validator("environment")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in ENVIRONMENTS:
            raise ValueError(f"unknown environment {name!r}: {nearest(name, list(ENVIRONMENTS))}")
        return name

    @field_validator("params")
    @classmethod
    def _fit(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("environment")
        if name is not None:
            validated(ENVIRONMENTS[name].Config, params, f"params of the environment {name!r}")
        return params


@rollout(name="player")
async def environment(task: Task, config: AgentConfig) -> Episode:
    """One game. Signals: ``solved``, ``turns``, ``parse_errors`` and what the environment adds."""
    settings = EnvironmentConfig.model_validate(config.metadata)
    name, params = _chosen(task, settings)
    game = environment_named(name, params)
    rules = game.rules if settings.rules is None else settings.rules
    instruction = text_of(task.instruction) if settings.show_instruction else ""
    head = "\n\n".join(filter(None, [instruction, rules]))
    said: Messages = []
    reward, turns, errors, is_over, is_solved = 0.0, 0, 0, False, False
    signals: dict[str, float] = {}
    complaint = ""
    try:
        seen = await _called(game, game.reset, _seed(task))
        while not is_over and turns < settings.turns:
            message = {"role": "user", "content": complaint + seen}
            kept = said if settings.history is None else said[max(0, len(said) - 2 * settings.history) :]
            try:
                reply = await config.chat(_with_head([*kept, message], head, settings.system))
            except MaxTurnsReached:
                break  # the game ends here, and what it has paid counts
            said += [message, reply.message]
            turns += 1
            action = game.parse(reply.text)
            if action is None:
                errors += 1
                reward += settings.error_reward
                complaint = f"{settings.error}\n" if settings.error else ""
                continue
            outcome = await _called(game, game.step, action)
            complaint, seen, signals = "", outcome.observation, outcome.signals
            is_over, is_solved = outcome.is_over, outcome.is_solved
            reward += outcome.reward
    finally:
        game.close()
    signals = {**signals, "solved": float(is_solved), "turns": float(turns), "parse_errors": float(errors)}
    played = Trajectory(name=config.role, reward=reward, signals=signals)
    return Episode(trajectories=[played], artifacts={"environment": name, "is_over": is_over})


async def _called(game: TextEnvironment, method: Callable[[Any], Found], argument: Any) -> Found:
    """One call of an environment; of one that may take long, away from the loop in which other episodes wait."""
    return await asyncio.to_thread(method, argument) if game.may_take_long else method(argument)


def _chosen(task: Task, settings: EnvironmentConfig) -> tuple[str, dict[str, Any]]:
    if settings.environment is not None:
        return settings.environment, settings.params
    name = task.metadata.get("environment")
    if name is None or name == "gymnasium":
        raise InputError(
            f"task {task.id!r} names no environment that task data may choose",
            hint="set rollouts.agent_config.environment, or name frozen_lake or sokoban in the tasks' metadata",
        )
    return str(name), {**(task.metadata.get("params") or {}), **settings.params}


def _seed(task: Task) -> int:
    """The game is the task's and not the attempt's: all attempts at a task play the same one."""
    seed = task.metadata.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"task {task.id!r} has no seed in its metadata", hint="the generator `games` makes such tasks")
    return seed


def _with_head(messages: Messages, head: str, system: str | None) -> Messages:
    if head:
        first = messages[0]
        messages = [{**first, "content": f"{head}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": system}, *messages] if system else messages


PATTERN = Pattern(environment, EnvironmentConfig)
