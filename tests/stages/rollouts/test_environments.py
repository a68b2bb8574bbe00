"""The text environments by themselves: every game can be won, is the same each time, and reads answers as words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.rollouts.patterns.environments.base import MOVES, last_move
from stages.rollouts.patterns.environments.frozen_lake import FrozenLake, FrozenLakeConfig, frozen_lake
from stages.rollouts.patterns.environments.gym import Gym, GymConfig
from stages.rollouts.patterns.environments.sokoban import Sokoban, SokobanConfig, sokoban_level

SEEDS = st.integers(0, 2**63 - 1)


def way(game, seed, limit=20_000):
    """The shortest series of moves that wins, by trying all of them; None: there is none."""
    game.reset(seed)
    start = game.__dict__.copy()
    seen = {repr(start)}
    frontier: list[tuple[dict, tuple[str, ...]]] = [(start, ())]
    while frontier and len(seen) < limit:
        later = []
        for state, moves in frontier:
            for move in MOVES:
                game.__dict__.update(state)
                outcome = game.step(move)
                if outcome.is_solved:
                    return (*moves, move)
                after = game.__dict__.copy()
                if not outcome.is_over and repr(after) not in seen:
                    seen.add(repr(after))
                    later.append((after, (*moves, move)))
        frontier = later
    return None


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, size=st.integers(2, 7), frozen=st.floats(0.01, 1))
def test_every_lake_has_a_way(seed, size, frozen):
    game = FrozenLake(FrozenLakeConfig(size=size, frozen=frozen))
    assert way(game, seed) is not None
    lake = frozen_lake(seed, size, frozen)
    assert lake == frozen_lake(seed, size, frozen)
    assert [len(row) for row in lake] == [size] * size
    assert lake[0][0] == "S"
    assert lake[-1][-1] == "G"


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, size=st.integers(5, 7))
def test_every_sokoban_level_can_be_solved_and_is_not_yet(seed, size):
    game = Sokoban(SokobanConfig(size=size))
    seen = game.reset(seed)
    assert seen.count("X") == seen.upper().count("P") == 1
    assert seen.count("O") + seen.count("p") == 1
    solution = way(game, seed)
    assert solution is not None
    game.reset(seed)
    outcomes = [game.step(move) for move in solution]
    assert [outcome.is_over for outcome in outcomes] == [False] * (len(solution) - 1) + [True]
    assert sum(outcome.reward for outcome in outcomes) == 1


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, moves=st.lists(st.sampled_from(list(MOVES)), max_size=30), slippery=st.sampled_from([0.0, 0.5]))
def test_the_same_seed_and_moves_are_the_same_game(seed, moves, slippery):
    def played(make):
        game = make()
        seen = [game.reset(seed)]
        for move in moves:
            outcome = game.step(move)
            seen.append((outcome.observation, outcome.reward))
            if outcome.is_over:
                break
        return seen

    for make in (
        lambda: FrozenLake(FrozenLakeConfig(slippery=slippery)),
        lambda: Sokoban(SokobanConfig(boxes=2, step_reward=-0.1, box_reward=1)),
    ):
        assert played(make) == played(make)


def test_boxes_stop_at_walls_and_at_other_boxes():
    game = Sokoban(SokobanConfig(size=6, boxes=2))
    game.reset(0)
    inner = {(row, column) for row in range(1, 5) for column in range(1, 5)}
    game._walls = frozenset({(row, column) for row in range(6) for column in range(6)} - inner)
    game._boxes, game._targets, game._player = frozenset({(1, 2), (1, 3)}), frozenset({(4, 4), (4, 3)}), (1, 1)
    assert game.step("right").observation.splitlines()[1] == "#PXX_#"
    game._boxes = frozenset({(1, 4), (3, 3)})
    game._player = (1, 3)
    assert game.step("right").observation.splitlines()[1] == "#__PX#"


def test_lakes_end_at_holes_and_borders_hold():
    game = FrozenLake(FrozenLakeConfig())
    game.reset(0)
    game._lake = ["SFFF", "FHFH", "FFFH", "HFFG"]
    assert game.step("up").observation == "PFFF\nFHFH\nFFFH\nHFFG"
    game.step("down")
    lost = game.step("right")
    assert (lost.is_over, lost.is_solved, lost.reward) == (True, False, 0)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("left", "left"),
        ("I go RIGHT.", "right"),
        ("up, no: down", "down"),
        ("upright", None),
        ("", None),
        ("lef", None),
    ],
)
def test_a_move_is_the_last_whole_word_that_names_one(text, move):
    assert last_move(text) == move


def test_numbers_name_gymnasiums_actions_where_no_words_do():
    pytest.importorskip("gymnasium")
    game = Gym(GymConfig(id="Taxi-v4"))
    assert "+---------+" in game.reset(3)
    assert [game.parse(text) for text in ("5", "go 0 then 3", "6", "33", "north")] == [5, 3, None, None, None]
    assert game.step(4).reward in (-10, -1)
    game.close()


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, size=st.integers(5, 12), boxes=st.integers(1, 6), pulls=st.sampled_from([1, 5, 40]))
def test_a_level_is_found_for_all_parameters(seed, size, boxes, pulls):
    boxes = min(boxes, (size - 2) ** 2 // 4)
    walls, targets, placed, player = sokoban_level(seed, SokobanConfig(size=size, boxes=boxes, pulls=pulls))
    assert len(targets) == len(placed) == boxes
    assert placed != targets
    assert not walls & (targets | placed | {player})
    assert player not in placed
