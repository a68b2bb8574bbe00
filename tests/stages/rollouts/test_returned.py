"""What agents may return, and under which name their calls are then stored."""

import pytest

import rollmill
from stages.rollouts.returned import returned


def names(result, recorded):
    return returned(result, "default", recorded).names


def test_a_named_trajectory_without_steps_is_filled_from_the_recorded_calls():
    assert names(rollmill.Trajectory(name="solver"), ["default"]) == {"default": "solver"}
    episode = rollmill.Episode(trajectories=[rollmill.Trajectory(name="judge"), rollmill.Trajectory(name="solver")])
    assert names(episode, ["default", "judge"]) == {"default": "solver"}


def test_calls_made_under_a_name_keep_it():
    two = [rollmill.Trajectory(name="a"), rollmill.Trajectory(name="b")]
    assert names(two, ["a", "b"]) == names(two, ["default"]) == names(rollmill.Trajectory(), ["default"]) == {}


def test_each_legal_value_becomes_artifacts():
    assert returned(None, "default", []).artifacts is None
    assert returned("4", "default", []).artifacts == '{"answer":"4"}'
    assert returned({"a": 1}, "default", []).artifacts == '{"a":1}'
    step = rollmill.Step(input="q", output="a", action=rollmill.Action("up"), done=True)
    trajectory = rollmill.Trajectory(name="s", steps=[step], reward=0.5, signals={"k": 1.0}, output="4")
    told = returned(rollmill.Episode(trajectories=[trajectory], artifacts={"x": 1}, is_correct=True), "default", [])
    assert told.artifacts == (
        '{"is_correct":true,"trajectories":{"s":{"output":"4","reward":0.5,"signals":{"k":1.0}}},"x":1}'
    )


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (7, "returned a int"),
        ([1], "returned a list"),
        ([rollmill.Trajectory(name="s"), rollmill.Trajectory(name="s")], "are called 's'"),
        (rollmill.Trajectory(name=""), "1 to 128 characters"),
        ({"when": object()}, "no canonical JSON form"),
    ],
)
def test_nonsense_is_refused_by_name(result, said):
    with pytest.raises((TypeError, ValueError), match=said):
        returned(result, "default", ["default"])
