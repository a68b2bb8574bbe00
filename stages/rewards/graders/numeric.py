"""The grader ``numeric``: the answer is the reference's value, however the number is written."""

from decimal import Context, Decimal, localcontext
from typing import ClassVar

from pydantic import Field

from stages.rewards.answers import Extraction, extracted, number
from stages.rewards.graders.base import AnswerGrader


class Numeric(AnswerGrader):
    """Compares values: ``$1,234.50``, ``3/4`` and ``1e3`` are read; a percent sign is ignored (50% is 50).

    A reference such as GSM8K's, reasoning that ends in ``#### 18``, is read after its last ``marker``.
    """

    version: ClassVar[str] = "1"

    extract: Extraction = "last_number"
    abs_tol: float = Field(default=1e-6, ge=0)
    """Largest difference that counts as equal."""
    rel_tol: float = Field(default=0.0, ge=0, lt=1)
    """Largest difference that counts as equal, as a share of the reference."""

    def matches(self, answer: str, reference: str) -> bool | None:
        expected = number(extracted(reference, "marker", marker=self.marker) or reference)
        if expected is None:
            raise ValueError(f"the reference answer {reference[-80:]!r} is not a number")
        given = number(answer)
        if given is None:
            return None
        with localcontext(Context(traps=[])):  # a number of absurd size is wrong, not an exception
            margin = max(Decimal(self.abs_tol), Decimal(self.rel_tol) * abs(expected))
            return given == expected or abs(given - expected) <= margin
