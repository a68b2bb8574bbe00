"""FrozenLake: walk from the start over the ice to the goal, and into no hole. Maps come from the seed, each with a way.

The game of Gymnasium's toy text (S, F, H, G), with the player shown as P.
"""

import random
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from schemas.config import ConfigModel
from stages.rollouts.patterns.environments.base import MOVES, Outcome, TextEnvironment, last_move

Cell = tuple[int, int]


class FrozenLakeConfig(ConfigModel):
    """What a lake is like."""

    size: int = Field(default=4, ge=2, le=32)
    """Rows and columns."""
    frozen: float = Field(default=0.8, gt=0, le=1)
    """Chance of each cell to be ice and no hole; lakes without a way to the goal are drawn again."""
    slippery: float = Field(default=0.0, ge=0, lt=1)
    """Chance that a step goes to one of the two sides instead. 0: never."""


class FrozenLake(TextEnvironment):
    """Reward 1 at the goal, else 0; a hole ends the game."""

    Config: ClassVar[type[ConfigModel]] = FrozenLakeConfig

    def __init__(self, config: FrozenLakeConfig):
        self._config = config
        self._random = random.Random(0)
        self._lake: list[str] = []
        self._player: Cell = (0, 0)

    @property
    def rules(self) -> str:
        return (
            "Walk over a frozen lake from S to the goal G. P is you, F is ice, H is a hole: whoever steps into it has "
            "lost.\nAnswer with one word: left, down, right or up."
        )

    def reset(self, seed: int) -> str:
        self._lake = frozen_lake(seed, self._config.size, self._config.frozen)
        self._random = random.Random(f"slips {seed}")
        self._player = (0, 0)
        return self._seen()

    def parse(self, text: str) -> str | None:
        return last_move(text)

    def step(self, action: str) -> Outcome:
        down, right = MOVES[action]
        if self._config.slippery and self._random.random() < self._config.slippery:
            sign = self._random.choice((-1, 1))
            down, right = sign * right, sign * down
        row, column, last = self._player[0] + down, self._player[1] + right, self._config.size - 1
        self._player = (min(max(row, 0), last), min(max(column, 0), last))
        cell = self._lake[self._player[0]][self._player[1]]
        return Outcome(self._seen(), float(cell == "G"), is_over=cell in "GH", is_solved=cell == "G")

    def _seen(self) -> str:
        row, column = self._player
        return "\n".join(
            line[:column] + "P" + line[column + 1 :] if number == row else line
            for number, line in enumerate(self._lake)
        )


def frozen_lake(seed: int, size: int, frozen: float) -> list[str]:
    """The rows of the lake that ``seed`` stands for; its goal can be reached from its start.

    After as many draws as would be hopeless, holes are turned into ice one after the other until there is a way.
    """
    drawn = random.Random(seed)
    last = size - 1
    for _ in range(100):
        cells = [["F" if drawn.random() < frozen else "H" for _ in range(size)] for _ in range(size)]
        cells[0][0], cells[last][last] = "S", "G"
        if has_way(cells):
            break
    holes = [(row, column) for row in range(size) for column in range(size) if cells[row][column] == "H"]
    drawn.shuffle(holes)
    while not has_way(cells):
        row, column = holes.pop()
        cells[row][column] = "F"
    return ["".join(row) for row in cells]


def has_way(cells: list[list[str]] | list[str]) -> bool:
    """Whether the goal, in the last corner, can be reached from the first one without a hole."""
    reached: set[Cell] = set()
    open_: list[Cell] = [(0, 0)]
    while open_:
        cell = open_.pop()
        if cell not in reached:
            reached.add(cell)
            open_ += [(row, column) for row, column in _beside(cell, len(cells)) if cells[row][column] != "H"]
    return (len(cells) - 1, len(cells) - 1) in reached


def _beside(cell: Cell, size: int) -> Iterator[Cell]:
    for down, right in MOVES.values():
        row, column = cell[0] + down, cell[1] + right
        if 0 <= row < size and 0 <= column < size:
            yield row, column
