"""Several solvers answer side by side, and a judge chooses one of their answers.

Each is a trajectory of its own (``solver-0``, ``solver-1``, …, ``judge``) with a reward of its own.
"""

import asyncio

from pydantic import Field

from schemas.records import Episode, Task
from stages.rollouts.patterns.base import Pattern
from stages.rollouts.patterns.judging import JudgeConfig, chosen
from stages.rollouts.sdk import AgentConfig, rollout


class SolverJudgeConfig(JudgeConfig):
    """Settings of ``solver_judge``."""

    solvers: int = Field(default=2, ge=1, le=64)


@rollout(name="judge")
async def solver_judge(task: Task, config: AgentConfig) -> Episode:
    """Artifacts: ``answers`` by trajectory (the judge's is the answer that it chose; null where it chose none) and
    ``chosen``, the trajectory."""
    settings = SolverJudgeConfig.model_validate(config.metadata)
    roles = [f"solver-{number}" for number in range(settings.solvers)]
    first = settings.opening(task.instruction)
    replies = await asyncio.gather(*(config.for_role(role).chat(first) for role in roles))
    texts = [reply.text for reply in replies]
    ruling = await config.chat(settings.opening(settings.asked(task, texts)))
    index = chosen(ruling.text, len(texts))
    role = None if index is None else roles[index]
    answers: dict[str, str | None] = {name: text.strip() for name, text in zip(roles, texts, strict=True)}
    answers[config.role] = None if role is None else answers[role]
    return Episode(artifacts={"answers": answers, "chosen": role})


PATTERN = Pattern(solver_judge, SolverJudgeConfig)
