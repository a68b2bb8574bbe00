"""What has been sampled of an answer that is not whole yet: for who reads along, and for the record of a call that is
given up."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Tokens = tuple[np.ndarray, np.ndarray]
"""Sampled ids (int32) and one logprob each (float32)."""
NO_TOKENS: Tokens = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))


@dataclass(frozen=True)
class Partial:
    """What is known of a model call that is given up."""

    policy_id: str
    """The policy that was asked."""
    prompt_ids: np.ndarray
    """int32, the full prompt."""
    response_ids: np.ndarray | None
    """int32, what was sampled until then, perhaps nothing; None: the engine does not tell before an answer is whole."""
    logprobs: np.ndarray | None
    """float32, one for each sampled id; None with these."""


class Progress:
    """Of one model call. The engine says where to look; may be looked at from any thread."""

    def __init__(self, changed: Callable[[], None] | None = None):
        """
        Args:
            changed: called, from any thread, when more was sampled. None: nobody reads along, so an engine need not do
                more work to tell than it does anyway.
        """
        self._changed = changed
        self._asked: tuple[np.ndarray, str] | None = None
        """The full prompt and the policy; None: it was not asked yet."""
        self._look: Callable[[], Tokens] | None = None
        """None: the engine has not said where."""

    @property
    def is_followed(self) -> bool:
        """Whether somebody reads along."""
        return self._changed is not None

    def ask(self, prompt_ids: np.ndarray, policy_id: str) -> None:
        """Notes what is asked, and of which policy."""
        self._asked = (prompt_ids, policy_id)

    def begin(self, look: Callable[[], Tokens]) -> None:
        """What was sampled is found by ``look`` from now on; also where an answer is begun anew elsewhere."""
        self._look = look

    def more(self) -> None:
        """Tells who reads along that there is more."""
        if self._changed is not None:
            self._changed()

    def freeze(self) -> None:
        """Keeps what was sampled until now, since sampling ends here."""
        kept = self.sampled()
        self._look = lambda: kept

    def sampled(self) -> Tokens:
        """All so far."""
        return NO_TOKENS if self._look is None else self._look()

    def partial(self) -> Partial | None:
        """What is known of the call now; None: the policy was not asked."""
        if self._asked is None:
            return None
        prompt_ids, policy_id = self._asked
        return Partial(policy_id, prompt_ids, *((None, None) if self._look is None else self._look()))


class Pieces:
    """An answer's tokens as they come, one after another. Adding costs what is new; they may be looked at from any
    thread meanwhile."""

    def __init__(self) -> None:
        self._room = NO_TOKENS
        self._so_far = NO_TOKENS

    def add(self, piece: Tokens) -> None:
        begin = len(self._so_far[0])
        end = begin + len(piece[0])
        if end > len(self._room[0]):
            self._room = (np.empty(2 * end, dtype=np.int32), np.empty(2 * end, dtype=np.float32))
            self._write(0, self._so_far)
        self._write(begin, piece)
        ids, logprobs = self._room
        self._so_far = (ids[:end], logprobs[:end])  # last, so that who looks meanwhile sees whole tokens

    def so_far(self) -> Tokens:
        """All that were added; not to be written to."""
        return self._so_far

    def _write(self, begin: int, piece: Tokens) -> None:
        for room, new in zip(self._room, piece, strict=True):
            room[begin : begin + len(new)] = new
