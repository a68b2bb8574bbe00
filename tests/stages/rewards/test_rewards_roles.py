"""Rewards of episodes with several roles: each trajectory by its own answer, or by what the agent gave it."""

import json
from typing import Any

import pytest

from stages.artifacts.store import Store
from tests.builders import episode_rows, given, step_rows, task_rows
from tests.stages.rewards.helpers import grade, rows


def episode_with(store: Store, artifacts: Any, *, roles: tuple[str, ...] = ("solver-0", "judge"), status="completed"):
    """One attempt at the task whose answer is 2, in which each role said "2"."""
    tasks = given(store, "tasks", {"tasks": task_rows(2)[1:]})
    episodes = episode_rows(["t001"], 1, status=status, artifacts=None if artifacts is None else json.dumps(artifacts))
    steps = [row for role in roles for row in step_rows(["t001-0"], response="2", trajectory=role)]
    return tasks, given(store, "rollouts", {"episodes": episodes, "steps": steps}, inputs={"tasks": [tasks]})


def by_role(frame: Any, *columns: str) -> dict[str, Any]:
    return {row["trajectory"]: tuple(row[name] for name in columns) for row in frame.iter_rows(named=True)}


def test_each_role_is_graded_by_the_answer_that_the_agent_declares_for_it(store: Store) -> None:
    made = episode_with(store, {"answers": {"solver-0": "3", "judge": None, "nobody": "2"}})
    _, frame = grade(store, made, grader="exact", params={"of": "answers"})
    assert by_role(frame, "status", "reward", "verdict") == {
        "solver-0": ("ok", 0, "wrong_answer"),
        "judge": ("ok", 0, "no_answer"),
    }
    _, frame = grade(store, made, grader="exact")
    assert by_role(frame, "reward") == {"solver-0": (1,), "judge": (1,)}  # what was said, and not what was declared


@pytest.mark.parametrize("artifacts", [None, {"answers": {"judge": "2"}}, {"answers": {"solver-0": 2, "judge": "2"}}])
def test_a_role_without_a_declared_answer_is_a_failure_and_no_zero(store: Store, artifacts: Any) -> None:
    _, frame = grade(store, episode_with(store, artifacts), grader="numeric", params={"of": "answers"})
    assert by_role(frame, "status", "reward")["solver-0"] == ("error", None)


def test_a_role_that_was_cut_off_before_it_declared_anything_has_no_answer(store: Store) -> None:
    made = episode_with(store, None, status="max_turns")
    _, frame = grade(store, made, grader="exact", params={"of": "answers"})
    assert set(by_role(frame, "status", "reward", "verdict").values()) == {("ok", 0.0, "truncated")}


def test_what_the_agent_gave_becomes_the_reward_with_its_signals(store: Store) -> None:
    gave = {
        "trajectories": {"solver-0": {"reward": 0.25, "signals": {"turns": 3}}, "judge": {"reward": -1, "signals": {}}}
    }
    manifest, frame = grade(store, episode_with(store, gave), grader="agent", params={"correct_at": 0.25})
    assert by_role(frame, "reward", "is_correct", "verdict") == {
        "solver-0": (0.25, True, "correct"),
        "judge": (-1, False, "wrong_answer"),
    }
    assert rows(store, manifest, "signals").rows() == [("t001-0", "solver-0", "turns", 3.0)]
    _, frame = grade(store, episode_with(store, gave), grader="agent")
    assert by_role(frame, "reward", "is_correct")["judge"] == (-1, None)


def test_a_solved_game_is_correct_whatever_it_paid(store: Store) -> None:
    gave = {"trajectories": {"player": {"reward": -0.5, "signals": {"solved": 1}}}}
    _, frame = grade(store, episode_with(store, gave, roles=("player",)), grader="agent")
    assert by_role(frame, "reward", "is_correct", "verdict") == {"player": (-0.5, True, "correct")}


@pytest.mark.parametrize("artifacts", [None, {"trajectories": 5}, {"trajectories": {"judge": {"reward": 1.0}}}])
def test_a_trajectory_to_which_the_agent_gave_nothing_is_a_failure_and_no_zero(store: Store, artifacts: Any) -> None:
    _, frame = grade(store, episode_with(store, artifacts), grader="agent")
    assert by_role(frame, "status", "reward")["solver-0"] == ("error", None)
