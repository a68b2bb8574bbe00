"""Texts at which an answer ends. They may begin and end inside a token, so ids are looked at as text; an answer has
ended with the first id after which its text holds one of them."""

from collections.abc import Callable, Sequence

import numpy as np

TextOf = Callable[[np.ndarray], str]
"""The text of sampled ids."""
_BYTES_OF_CHARACTER = 4
"""At most, and so as many tokens."""


def found_in(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where in the text the stop begins that is complete first, and which it is; None: there is none."""
    found = [(place + len(stop), place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return None
    _, place, stop = min(found, key=lambda one: one[0])
    return place, stop


def n_until_stop(ids: np.ndarray, stops: Sequence[str], text_of: TextOf) -> int | None:
    """How many ids there are up to and with the one that completes a stop; None: none does."""
    if found_in(text_of(ids), stops) is None:
        return None
    without, complete = 0, len(ids)
    while complete - without > 1:
        middle = (without + complete) // 2
        if found_in(text_of(ids[:middle]), stops) is None:
            without = middle
        else:
            complete = middle
    return complete


def is_completed_by_last(ids: np.ndarray, stops: Sequence[str], text_of: TextOf) -> bool:
    """Whether the last id completes a stop, where those before it did not. Only as many ids are looked at as matter."""
    longest = max(map(len, stops))
    size = _BYTES_OF_CHARACTER * longest + 1
    while size < len(ids) and len(text_of(ids[-size:-1])) < longest:  # special tokens have no text
        size *= 2
    # A look that begins inside a character sees something else there, so what it finds is looked up in the whole.
    return found_in(text_of(ids[-size:]), stops) is not None and found_in(text_of(ids), stops) is not None
