"""Tells an answer while it is sampled: the text that is sure, whatever follows.

What may still turn out to be something else (half a character, the beginning of a stop text, of a tool call or of
reasoning) is held back until that is known, so that all pieces together are the answer as it is recorded.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from schemas.errors import RollmillError
from stages.rollouts.calls import ModelAnswer
from stages.rollouts.engines.progress import NO_TOKENS, Progress, Tokens
from stages.rollouts.engines.stopping import found_in
from stages.rollouts.formats import held_from

_HALF = "\ufffd"
"""How a character of which only some bytes were sampled is decoded."""
_BEFORE = 8
"""Sampled ids before new ones that are decoded with them."""


class StreamBroken(RollmillError):
    """An answer was begun anew and came out differently, after its beginning had been told."""


@dataclass(frozen=True)
class Piece:
    """More of an answer."""

    prompt_tokens: int | None
    """Of the whole prompt; None: whoever answers does not say."""
    reasoning: str = ""
    content: str = ""
    tokens: Tokens = field(default=NO_TOKENS, repr=False)
    """Sampled since the piece before; the text of the last ones may be held back."""


@dataclass(frozen=True)
class Reading:
    """How sampled ids are read."""

    prompt_tokens: int
    text_after: Callable[[np.ndarray, np.ndarray], str]
    """The text of sampled ids that follow others."""
    sure: Callable[[str], tuple[str, str]]
    """Reasoning and content that are sure in the beginning of an answer."""
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]


class Teller:
    """Follows one call in the event loop in which it is made."""

    def __init__(self, tell: Callable[[Piece], None]):
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._reading: Reading | None = None
        self._tokens: Tokens = NO_TOKENS
        self._text, self._n_read = "", 0
        self._reasoning, self._content = "", ""
        self.progress = Progress(self._changed)

    def begin(self, reading: Reading) -> None:
        self._reading = reading

    def end(self, answer: ModelAnswer) -> None:
        """Tells no more.

        Raises:
            StreamBroken: the answer is not what was told.
        """
        self._reading = None
        ids, n = self._tokens[0], len(self._tokens[0])
        sampled = NO_TOKENS[0] if answer.response_ids is None else answer.response_ids
        if not (
            np.array_equal(sampled[:n], ids)
            and (answer.reasoning or "").startswith(self._reasoning)
            and answer.content.startswith(self._content)
        ):
            raise StreamBroken("the answer was begun anew, and differs from what had been told of it")

    def _changed(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        ids, logprobs = self.progress.sampled()
        before, reading = len(self._tokens[0]), self._reading
        if reading is None or len(ids) <= before or not np.array_equal(ids[:before], self._tokens[0]):
            return
        self._tokens = (ids, logprobs)
        reasoning, content = reading.sure(self._read(ids, reading))
        piece = Piece(
            reading.prompt_tokens,
            reasoning[len(self._reasoning) :],
            content[len(self._content) :],
            (ids[before:], logprobs[before:]),
        )
        self._reasoning, self._content = reasoning, content
        self._tell(piece)

    def _read(self, ids: np.ndarray, reading: Reading) -> str:
        """The text that no stop text and no further byte can change."""
        n = len(ids) - (int(ids[-1]) in reading.stop_ids)
        new = reading.text_after(ids[max(0, self._n_read - _BEFORE) : self._n_read], ids[self._n_read : n])
        if not new.endswith(_HALF):
            self._text, self._n_read = self._text + new, n
        found = found_in(self._text, reading.stop_texts)
        return self._text[: held_from(self._text, reading.stop_texts) if found is None else found[0]]
