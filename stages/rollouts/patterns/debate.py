"""Sides answer, read each other and answer again, round after round; a judge then says which side is right.

Each side is a conversation of its own (``side-0``, ``side-1``, …) with a reward of its own, and so is the judge.
"""

import asyncio
from typing import Annotated, Any

from pydantic import Field, model_validator

from schemas.records import Episode, Task
from stages.rollouts.patterns.base import Pattern, placeholders, text_of
from stages.rollouts.patterns.judging import JudgeConfig, chosen
from stages.rollouts.sdk import AgentConfig, Reply, rollout


class DebateConfig(JudgeConfig):
    """Settings of ``debate``."""

    sides: int = Field(default=2, ge=2, le=16)
    rounds: int = Field(default=2, ge=1, le=32)
    """How often each side speaks; in the first round it has not heard the others."""
    positions: list[str] | None = None
    """What each side is told to stand for, one text a side. None: all sides are only given the task."""
    position_prompt: Annotated[str, placeholders("instruction", "position")] = (
        "{instruction}\n\nYour position: {position}"
    )
    """The first message of a side that has a position."""
    rebuttal_prompt: Annotated[str, placeholders("others")] = (
        "The others said:\n\n{others}\n\nReply, and give your answer."
    )
    """What a side is told from the second round on."""
    judge: bool = True
    """Whether a judge decides at the end, on the last words of each side."""

    @model_validator(mode="after")
    def _each_side_has_a_position(self) -> "DebateConfig":
        if self.positions is not None and len(self.positions) != self.sides:
            raise ValueError(f"{self.sides} sides, and {len(self.positions)} positions")
        return self


@rollout(name="judge")
async def debate(task: Task, config: AgentConfig) -> Episode:
    """Artifacts: ``answers`` by trajectory (the last words of each side; for the judge those of the side that it chose,
    null where it chose none) and ``chosen``, the side."""
    settings = DebateConfig.model_validate(config.metadata)
    roles = [f"side-{number}" for number in range(settings.sides)]
    talks = [settings.opening(content) for content in _openings(task, settings)]
    words: list[str] = []
    for turn in range(settings.rounds):
        if turn:
            for number, talk in enumerate(talks):
                others = settings.separator.join(
                    settings.candidate.format(number=other + 1, text=text)
                    for other, text in enumerate(words)
                    if other != number
                )
                talk.append({"role": "user", "content": settings.rebuttal_prompt.format(others=others)})
        replies: list[Reply] = await asyncio.gather(
            *(config.for_role(role).chat(list(talk)) for role, talk in zip(roles, talks, strict=True))
        )
        for talk, reply in zip(talks, replies, strict=True):
            talk.append(reply.message)
        words = [reply.text for reply in replies]
    answers: dict[str, str | None] = {role: text.strip() for role, text in zip(roles, words, strict=True)}
    if not settings.judge:
        return Episode(artifacts={"answers": answers})
    ruling = await config.chat(settings.opening(settings.asked(task, words)))
    index = chosen(ruling.text, settings.sides)
    side = None if index is None else roles[index]
    answers[config.role] = None if side is None else answers[side]
    return Episode(artifacts={"answers": answers, "chosen": side})


def _openings(task: Task, settings: DebateConfig) -> list[Any]:
    if settings.positions is None:
        return [task.instruction] * settings.sides
    instruction = text_of(task.instruction)
    return [
        settings.position_prompt.format(instruction=instruction, position=position) for position in settings.positions
    ]


PATTERN = Pattern(debate, DebateConfig)
