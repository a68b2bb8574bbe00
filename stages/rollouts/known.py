"""What a session knows of the conversation that it has read last, so that the next call costs what it adds."""

import hashlib
from dataclasses import dataclass

import orjson

from stages.rollouts.sdk import Messages


@dataclass(frozen=True)
class Known:
    """Messages as they were read; they themselves are not held."""

    n: int
    keys: list[bytes]
    """Of the first 0, 1, … messages."""
    hasher: "hashlib._Hash"
    """Has read the messages."""

    def begins(self, messages: Messages) -> bool:
        """Whether a conversation begins with exactly these messages, the order of their fields included."""
        if self.n > len(messages):
            return False
        hasher = hasher_of(messages[: self.n])
        return hasher is not None and hasher.digest() == self.hasher.digest()


def hasher_of(messages: Messages, before: "hashlib._Hash | None" = None) -> "hashlib._Hash | None":
    """What has read these messages after those ``before``; None: they hold what is no JSON."""
    hasher = hashlib.sha256() if before is None else before.copy()
    if messages:
        try:
            hasher.update(orjson.dumps(messages)[1:-1] + b",")  # the same, however many are read at once
        except TypeError:
            return None
    return hasher
