"""What a text environment is: it tells what is to be seen, and takes an action in words.

An environment knows nothing of policies and messages, and is the same for the same seed.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from schemas.config import ConfigModel


@dataclass(frozen=True)
class Outcome:
    """What an action led to."""

    observation: str
    reward: float
    is_over: bool
    is_solved: bool
    """Whether the goal has been reached; with ``is_over``."""
    signals: dict[str, float] = field(default_factory=dict)
    """Further numbers to be recorded, of the state that was reached."""


class TextEnvironment(ABC):
    """One game, from its beginning to its end."""

    Config: ClassVar[type[ConfigModel]]
    """Its parameters."""
    may_take_long: ClassVar[bool] = False
    """Whether ``reset`` and ``step`` are called in a thread of their own."""

    @abstractmethod
    def __init__(self, config: Any):
        """Takes the parameters."""

    @property
    @abstractmethod
    def rules(self) -> str:
        """What a player must know, in words."""

    @abstractmethod
    def reset(self, seed: int) -> str:
        """Begins the game that ``seed`` stands for, and tells what is to be seen."""

    @abstractmethod
    def parse(self, text: str) -> Any:
        """The action that an answer names; None: it names none."""

    @abstractmethod
    def step(self, action: Any) -> Outcome:
        """Takes an action that ``parse`` has found."""

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Called when the game is left."""


MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Row and column by the words for a direction."""

_MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)


def last_move(text: str) -> str | None:
    """The last direction that a text names, as a word of its own."""
    found = _MOVE.findall(text)
    return found[-1].lower() if found else None
