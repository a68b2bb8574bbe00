"""Sokoban: push every box onto a target. Levels come from the seed, each made by pulling boxes away from their targets,
so that each can be solved.
"""

import random
from typing import ClassVar

from pydantic import Field, model_validator

from schemas.config import ConfigModel
from stages.rollouts.patterns.environments.base import MOVES, Outcome, TextEnvironment, last_move

Cell = tuple[int, int]
_INNER_WALLS = 0.12
"""Share of the inner cells that are walls."""
_TRIES = 100


class SokobanConfig(ConfigModel):
    """What a level is like."""

    size: int = Field(default=6, ge=5, le=20)
    """Rows and columns, with the walls around."""
    boxes: int = Field(default=1, ge=1, le=6)
    pulls: int = Field(default=20, ge=1, le=500)
    """How often a box, chosen at random, is drawn back by a cell; more make harder levels."""
    step_reward: float = Field(default=0.0, ge=-1, le=1)
    """Of every step."""
    box_reward: float = Field(default=0.0, ge=0, le=10)
    """For each box put onto a target, and taken off again when it leaves it."""

    @model_validator(mode="after")
    def _boxes_have_room(self) -> "SokobanConfig":
        if self.boxes > (self.size - 2) ** 2 // 4:
            raise ValueError(f"{self.boxes} boxes have no room on {self.size} by {self.size} cells")
        return self


class Sokoban(TextEnvironment):
    """Reward 1 where all boxes are on targets, which ends the game, besides what the parameters give."""

    Config: ClassVar[type[ConfigModel]] = SokobanConfig

    def __init__(self, config: SokobanConfig):
        self._config = config
        self._walls: frozenset[Cell] = frozenset()
        self._targets: frozenset[Cell] = frozenset()
        self._boxes: frozenset[Cell] = frozenset()
        self._player: Cell = (0, 0)

    @property
    def rules(self) -> str:
        return (
            "Push every box onto a target. P is you, p is you on a target, # is a wall, _ is floor, X is a box, O is a "
            "target, V is a box on a target. You push a box by walking against it, one at a time; you cannot pull.\n"
            "Answer with one word: left, down, right or up."
        )

    def reset(self, seed: int) -> str:
        self._walls, self._targets, self._boxes, self._player = sokoban_level(seed, self._config)
        return self._seen()

    def parse(self, text: str) -> str | None:
        return last_move(text)

    def step(self, action: str) -> Outcome:
        before = len(self._boxes & self._targets)
        ahead = _moved(self._player, action)
        if ahead in self._boxes:
            behind = _moved(ahead, action)
            if behind not in self._walls and behind not in self._boxes:
                self._boxes = self._boxes - {ahead} | {behind}
                self._player = ahead
        elif ahead not in self._walls:
            self._player = ahead
        placed = len(self._boxes & self._targets)
        is_solved = self._boxes == self._targets
        reward = self._config.step_reward + self._config.box_reward * (placed - before) + is_solved
        return Outcome(self._seen(), float(reward), is_solved, is_solved, {"boxes_on_target": float(placed)})

    def _seen(self) -> str:
        cells = range(self._config.size)
        return "\n".join("".join(self._sign((row, column)) for column in cells) for row in cells)

    def _sign(self, cell: Cell) -> str:
        if cell in self._walls:
            return "#"
        on_target = cell in self._targets
        if cell == self._player:
            return "p" if on_target else "P"
        if cell in self._boxes:
            return "V" if on_target else "X"
        return "O" if on_target else "_"


def sokoban_level(seed: int, config: SokobanConfig) -> tuple[frozenset[Cell], frozenset[Cell], frozenset[Cell], Cell]:
    """Walls, targets, boxes and player of the level that ``seed`` stands for; it can be solved, and is not yet.

    Every pull is a push backwards, so that pushing solves it.
    """
    drawn = random.Random(seed)
    inner = [(row, column) for row in range(1, config.size - 1) for column in range(1, config.size - 1)]
    border = {(row, column) for row in range(config.size) for column in range(config.size)} - set(inner)
    for attempt in range(_TRIES):
        share = _INNER_WALLS if attempt < _TRIES // 2 else 0.0  # an open floor always has room for a pull
        walls = frozenset(border | {cell for cell in inner if drawn.random() < share})
        free = [cell for cell in inner if cell not in walls]
        if len(free) <= config.boxes:
            continue
        *targets, player = drawn.sample(free, config.boxes + 1)
        boxes = set(targets)
        for _ in range(config.pulls):
            player = _pulled(drawn, walls, boxes, player)
        left = len(boxes - set(targets))
        if left == config.boxes or (left and attempt >= _TRIES // 2):
            return walls, frozenset(targets), frozenset(boxes), player
    raise ValueError(f"no Sokoban level found for seed {seed} with {config!r}")


def _pulled(drawn: random.Random, walls: frozenset[Cell], boxes: set[Cell], player: Cell) -> Cell:
    """Draws one box, chosen at random, a cell back, from where the player can walk to; the player's new cell."""
    can_stand = _reachable(walls, boxes, player)
    choices = [
        (box, move)
        for box in sorted(boxes)
        for move in MOVES
        if _moved(box, move) in can_stand and _moved(_moved(box, move), move) not in walls | boxes
    ]
    if not choices:
        return player
    box, move = drawn.choice(choices)
    boxes.remove(box)
    boxes.add(_moved(box, move))
    return _moved(_moved(box, move), move)


def _reachable(walls: frozenset[Cell], boxes: set[Cell], player: Cell) -> set[Cell]:
    reached: set[Cell] = set()
    open_ = [player]
    while open_:
        cell = open_.pop()
        if cell not in reached and cell not in walls and cell not in boxes:
            reached.add(cell)
            open_ += [_moved(cell, move) for move in MOVES]
    return reached


def _moved(cell: Cell, move: str) -> Cell:
    down, right = MOVES[move]
    return cell[0] + down, cell[1] + right
