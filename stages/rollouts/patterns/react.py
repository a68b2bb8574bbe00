"""Thinks, uses a tool, sees what came of it, and so on until it answers: in plain text, with any chat template."""

import asyncio
import re
from typing import Literal

from pydantic import Field, field_validator

from schemas.records import Episode, Task, Trajectory
from stages.rollouts.patterns.base import Pattern, PatternConfig
from stages.rollouts.patterns.calculator import CalculatorError, calculate
from stages.rollouts.patterns.sandbox import SandboxLimits, run_python
from stages.rollouts.sdk import AgentConfig, MaxTurnsReached, rollout

Tool = Literal["calculator", "python"]

_DESCRIPTIONS: dict[str, str] = {
    "calculator": "calculator: the value of one expression, such as 12 * (3 + 4)",
    "python": "python: runs a program and shows what it prints; nothing is kept between two programs",
}
_INSTRUCTIONS = (
    "Solve the task. You have these tools:\n{tools}\n\nTo use one, write\nAction: NAME\nInput: WHAT GOES IN\n"
    "and end your turn; you will be told what came of it. When you know the answer, write\nAnswer: THE ANSWER"
)
_ACTION = re.compile(r"^[ \t]*Action:[ \t]*(\S+)[ \t]*\r?\n[ \t]*Input:[ \t]*(.*)", re.DOTALL | re.MULTILINE)
_ANSWER = re.compile(r"^[ \t]*Answer:[ \t]*(.*?)(?=^[ \t]*(?:Action|Observation):|\Z)", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^\s*```[a-zA-Z0-9]*\r?\n(.*?)\r?\n?```", re.DOTALL)


class ReactConfig(PatternConfig):
    """Settings of ``react``."""

    tools: list[Tool] = Field(default=["calculator", "python"], min_length=1)
    """What may be used."""
    turns: int = Field(default=8, ge=1, le=1000)
    """Answers of the policy at most; then there is no answer."""
    instructions: str | None = None
    """Stands in the place of the text that explains the tools and the form, in the system message after ``system``.
    None: that text."""
    sandbox: SandboxLimits = SandboxLimits()
    """Limits of each program that ``python`` runs."""

    @field_validator("tools")
    @classmethod
    def _each_once(cls, tools: list[Tool]) -> list[Tool]:
        if len(set(tools)) != len(tools):
            raise ValueError("a tool stands there twice")
        return tools


@rollout(name="react")
async def react(task: Task, config: AgentConfig) -> Episode:
    """Artifacts: ``answer``, and ``answers`` by trajectory; null where there is none. Signals: ``turns``,
    ``tool_calls``, ``tool_errors`` and ``parse_errors`` (replies in no known form, which cost a turn)."""
    settings = ReactConfig.model_validate(config.metadata)
    listed = "\n".join(f"- {_DESCRIPTIONS[tool]}" for tool in settings.tools)
    explained = settings.instructions or _INSTRUCTIONS.format(tools=listed)
    system = "\n\n".join(filter(None, [settings.system, explained]))
    messages = settings.model_copy(update={"system": system}).opening(task.instruction)
    counts = dict.fromkeys(("turns", "tool_calls", "tool_errors", "parse_errors"), 0)
    answer: str | None = None
    while answer is None and counts["turns"] < settings.turns:
        try:
            reply = await config.chat(messages)
        except MaxTurnsReached:
            break  # the episode says so itself, and has no answer
        counts["turns"] += 1
        action, answer = parsed(reply.text)
        if answer is not None:
            break
        if action is None:
            counts["parse_errors"] += 1
            told = "That is neither an Action with an Input nor an Answer."
        else:
            counts["tool_calls"] += 1
            told, worked = await _used(*action, settings)
            counts["tool_errors"] += not worked
        messages = [*messages, reply.message, {"role": "user", "content": f"Observation: {told}"}]
    return Episode(
        trajectories=[Trajectory(name=config.role, signals={name: float(n) for name, n in counts.items()})],
        artifacts={"answer": answer, "answers": {config.role: answer}},
    )


def parsed(text: str) -> tuple[tuple[str, str] | None, str | None]:
    """The action (tool and input) or the final answer that a reply holds, whichever comes first in it."""
    action, answer = _ACTION.search(text), _ANSWER.search(text)
    if answer is not None and (action is None or answer.start() < action.start()):
        return None, answer[1].strip()
    if action is None:
        return None, None
    fenced = _FENCE.match(action[2])
    return (action[1], fenced[1] if fenced else action[2].strip()), None


async def _used(tool: str, given: str, settings: ReactConfig) -> tuple[str, bool]:
    """What the policy is told of a tool's work, and whether it worked."""
    if tool not in settings.tools:
        return f"there is no tool {tool[:40]!r}; there are {', '.join(settings.tools)}", False
    if tool == "calculator":
        try:
            return calculate(given), True
        except CalculatorError as error:
            return f"error: {error}", False
    ran = await asyncio.to_thread(run_python, given, settings.sandbox)
    if ran.status == "ok":
        return ran.output.strip() or "(nothing was printed)", True
    why = {
        "error": "",
        "timeout": f"the program took longer than {settings.sandbox.time_s:g} s",
        "killed": "the program went beyond a limit and was ended",
    }
    return "\n".join(filter(None, [ran.output.strip(), why[ran.status]])), False


PATTERN = Pattern(react, ReactConfig)
