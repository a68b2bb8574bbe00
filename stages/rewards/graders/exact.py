"""The grader ``exact``: the answer is the reference, letter for letter."""

from typing import ClassVar

from stages.rewards.graders.base import AnswerGrader


class Exact(AnswerGrader):
    """Compares text; white space at the ends never counts."""

    version: ClassVar[str] = "1"

    ignore_case: bool = False
    collapse_spaces: bool = True
    """Whether any run of white space counts as one space."""

    def matches(self, answer: str, reference: str) -> bool:
        return self._normal(answer) == self._normal(reference)

    def _normal(self, text: str) -> str:
        text = " ".join(text.split()) if self.collapse_spaces else text.strip()
        return text.casefold() if self.ignore_case else text
