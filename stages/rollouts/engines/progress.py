"""What has been sampled of an answer that is not whole yet: for who reads along, and for the record of a call that is
given up."""

from collections.abc import Callable, Sequence

import numpy as np

Tokens = tuple[np.ndarray, np.ndarray]
"""Sampled ids (int32) and one logprob each (float32)."""
NO_TOKENS: Tokens = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))


class Progress:
    """Of one model call. The engine says where to look; may be looked at from any thread."""

    def __init__(self, changed: Callable[[], None] | None = None):
        """
        Args:
            changed: called, from any thread, when more was sampled. None: nobody reads along, so an engine need not do
                more work to tell than it does anyway.
        """
        self._changed = changed
        self._look: Callable[[], Tokens] = lambda: NO_TOKENS

    @property
    def is_followed(self) -> bool:
        """Whether somebody reads along."""
        return self._changed is not None

    def begin(self, look: Callable[[], Tokens]) -> None:
        """What was sampled is found by ``look`` from now on; also where an answer is begun anew elsewhere."""
        self._look = look

    def more(self) -> None:
        """Tells who reads along that there is more."""
        if self._changed is not None:
            self._changed()

    def freeze(self) -> None:
        """Keeps what was sampled until now, since sampling ends here."""
        kept = self._look()
        self._look = lambda: kept

    def sampled(self) -> Tokens:
        """All so far."""
        return self._look()


def joined(parts: Sequence[Tokens]) -> Tokens:
    """One after another; at least one."""
    ids, logprobs = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(logprobs)
