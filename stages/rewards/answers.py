"""Finds the answer inside a response: the last number, what follows a marker, the last box, a pattern, or all of it.

Pure text functions, linear in the length of the text, which comes from a model and is not to be trusted.
"""

import re
from decimal import Decimal, DecimalException
from typing import Literal

Extraction = Literal["text", "last_number", "marker", "boxed", "regex"]

NEEDS_FORMAT = frozenset({"marker", "boxed", "regex"})
"""Extractions that ask the model for a form: without it the answer is badly formatted, not absent."""

_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-\u2212+])?\$?"  # a sign touches its number: 5-3 and 5 - 3 end in 3
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"
    r"(?:[eE][-+]?\d+(?!\w))?(?:/\d+(?:\.\d+)?)?"
)
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def extracted(text: str, method: Extraction, *, marker: str = "####", pattern: str | None = None) -> str | None:
    """The answer in ``text``, stripped; None where the method finds none.

    Args:
        marker: for ``marker``: the answer is the rest of the line after its last occurrence.
        pattern: for ``regex``: its last match counts, its first group where it has one.
    """
    if method == "text":
        answer: str | None = text
    elif method == "last_number":
        answer = last_number(text)
    elif method == "marker":
        _, found, rest = text.rpartition(marker)
        answer = rest.strip().partition("\n")[0] if found else None
    elif method == "boxed":
        answer = last_boxed(text)
    else:
        found_all = list(re.finditer(pattern or "", text))
        answer = found_all[-1].group(1 if found_all[-1].re.groups else 0) if found_all else None
    return (answer or "").strip() or None


def last_number(text: str) -> str | None:
    """The last number as it is written, sign, thousands separators and fraction included; None: there is none."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{…}`` or ``\fbox{…}``, braces balanced; None: there is none."""
    open_braces: list[tuple[bool, int]] = []
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token.group().endswith("{") and token.group() != r"\{":
            open_braces.append((token.group() != "{", token.end()))
        elif token.group() == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else text[last[0] : last[1]]


def number(text: str) -> Decimal | None:
    """The value of one number, with or without words around it: ``$1,234.50``, ``3/4``, ``-1.2e5``, ``50%`` (50).

    None where ``text`` holds no number, or several.
    """
    numbers = _NUMBER.findall(text)
    if len(numbers) != 1:
        return None
    top, _, bottom = numbers[0].replace(",", "").replace("$", "").replace("\u2212", "-").partition("/")
    try:
        return Decimal(top) / Decimal(bottom) if bottom else Decimal(top)
    except (DecimalException, ValueError):
        return None
