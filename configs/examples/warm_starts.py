"""Tasks from which the tiny policies of two recipes learn to speak, before rewards teach them: frozen_lake.yaml and
solver_judge.yaml.

Generators of a user's own: rows with ``prompt`` and ``answer``, the same for the same seed.
"""

import random

from stages.rollouts.patterns.environments.base import MOVES
from stages.rollouts.patterns.environments.frozen_lake import FrozenLake, FrozenLakeConfig

FORMS = ("{}", "={}", "{}.", ":{}")


def wandering(seed: int, *, guided: float = 0.0):
    """What is to be seen on a lake, and a move.

    Args:
        guided: share of the moves that go the shortest way; the others go anywhere.
    """
    drawn = random.Random(seed)
    lake = FrozenLake(FrozenLakeConfig())
    shown = set()
    while True:
        seen = lake.reset(drawn.randrange(2**40) * 2)
        for _ in range(drawn.randrange(6)):
            outcome = lake.step(drawn.choice(list(MOVES)))
            if outcome.is_over:
                break
            seen = outcome.observation
        if seen not in shown:
            shown.add(seen)
            best = first_move(seen.splitlines())
            is_guided = best is not None and drawn.random() < guided
            yield {"prompt": seen, "answer": best if is_guided else drawn.choice(list(MOVES))}


def first_move(rows: list[str]) -> str | None:
    """The first move of a shortest way from P to G; None: the player has no way."""
    start = next((row, line.index("P")) for row, line in enumerate(rows) if "P" in line)
    reached, frontier = {start}, [(start, "")]
    while frontier:
        later = []
        for (row, column), first in frontier:
            for move, (down, right) in MOVES.items():
                cell = (row + down, column + right)
                is_inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows)
                if is_inside and cell not in reached and rows[cell[0]][cell[1]] != "H":
                    if rows[cell[0]][cell[1]] == "G":
                        return first or move
                    reached.add(cell)
                    later.append((cell, first or move))
        frontier = later
    return None


def sums_and_choices(seed: int):
    """By turns a sum with its answer in some form, and two answers to a sum of which any one is chosen."""
    drawn = random.Random(seed)
    sums = [(f"{a} {sign} {b}", a + b if sign == "+" else a - b) for a in range(10) for b in range(10) for sign in "+-"]
    shown = set()
    while True:
        drawn.shuffle(sums)
        for expression, value in sums:
            answers = [drawn.choice(FORMS).format(value + drawn.choice((0, 0, 1, -1, 2))) for _ in range(2)]
            choice = f"{expression}\n1: {answers[0]}\n2: {answers[1]}"
            said = drawn.choice(FORMS).format(value)
            rows = ((expression, said), (choice, str(drawn.choice((1, 2)))))
            for prompt, answer in rows:
                if (prompt, answer) not in shown:
                    shown.add((prompt, answer))
                    yield {"prompt": prompt, "answer": answer}
