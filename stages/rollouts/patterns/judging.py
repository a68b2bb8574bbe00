"""How a judge is asked to choose one of several answers, and how its ruling is read."""

import re
from typing import Annotated

from schemas.records import Task
from stages.rollouts.patterns.base import PatternConfig, placeholders, text_of

_NUMBER = re.compile(r"\d+")


class JudgeConfig(PatternConfig):
    """Settings of patterns with a judge."""

    judge_prompt: Annotated[str, placeholders("candidates", optional="instruction")] = (
        "{instruction}\n\nThese answers were given:\n\n{candidates}\n\nWhich one is right? Say its number alone."
    )
    """What the judge is asked: ``{instruction}`` is the task's, ``{candidates}`` the answers."""
    candidate: Annotated[str, placeholders("number", "text")] = "Answer {number}:\n{text}"
    """How each answer is shown; numbers begin with 1."""
    separator: str = "\n\n"
    """Between two answers."""

    def asked(self, task: Task, texts: list[str]) -> str:
        """The judge's prompt."""
        shown = [self.candidate.format(number=number, text=text) for number, text in enumerate(texts, start=1)]
        return self.judge_prompt.format(instruction=text_of(task.instruction), candidates=self.separator.join(shown))


def chosen(text: str, n: int) -> int | None:
    """The index that a judge's last number stands for; None: it names none of the ``n``."""
    numbers = _NUMBER.findall(text)
    index = int(numbers[-1][:6]) - 1 if numbers else -1
    return index if 0 <= index < n else None
