r"""The grader ``math``: the answer equals the reference as mathematics (math-verify: LaTeX, sets, intervals).

Its own alarms are off, because the worker's limit would be lost with them: they share the process's one timer.
"""

import logging
from typing import Any, ClassVar, Literal

from stages.rewards.answers import Extraction, last_boxed
from stages.rewards.graders.base import AnswerGrader


class Math(AnswerGrader):
    """Compares by symbolic simplification; a comparison that takes too long is a timeout, never a wrong answer."""

    version: ClassVar[str] = "1"

    extract: Extraction = "text"
    r"""``text`` takes the last ``\boxed{…}``, else what math-verify finds: the last formula, else expression."""
    strict: bool = True
    """Whether variable names matter and sets differ from tuples."""
    float_rounding: int = 6
    """Decimal places to which decimals are compared."""

    def prepare(self) -> None:
        import math_verify  # noqa: F401  (a second of imports)

        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def matches(self, answer: str, reference: str) -> bool | None:
        from math_verify import verify

        expected = _parsed(reference, "reference")
        if not expected:
            raise ValueError(f"the reference answer {reference[-80:]!r} cannot be read as mathematics")
        given = _parsed(answer, "whole" if self.extract == "text" else "reference")
        if not given:
            return None
        return verify(
            expected,
            given,
            strict=self.strict,
            float_rounding=self.float_rounding,
            timeout_seconds=None,
            raise_on_error=True,
        )


def _parsed(text: str, what: Literal["reference", "whole"]) -> list[Any]:
    """The expressions in ``text``; empty where there are none that can be read."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    boxed = last_boxed(text)
    if boxed is not None:
        text = f"${boxed}$"
    elif what == "reference" and "$" not in text and "\\(" not in text and "\\[" not in text:
        text = f"${text}$"
    try:
        return parse(
            text,
            extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()],
            parsing_timeout=None,
            raise_on_error=True,
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the parser raises anything on text that is no formula
        return []
