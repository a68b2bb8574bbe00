"""The estimators against a slow reference in plain Python, and the promises that hold for any rewards."""

import math
import statistics
from collections.abc import Callable

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.advantages.estimators import ESTIMATORS
from stages.advantages.estimators.base import Samples
from stages.advantages.groups import with_statistics

REWARD = st.one_of(
    st.sampled_from([0.0, 1.0, 0.35, 0.1 + 0.2, -1.0]),
    st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False).map(lambda x: round(x, 6)),
)
GROUPS = st.lists(st.lists(REWARD, min_size=1, max_size=9), min_size=1, max_size=6)


def no_scan(name: str, table: str) -> pl.LazyFrame:
    raise AssertionError("these estimators read nothing else")


def estimated(name: str, groups: list[list[float]], **params: object) -> list[list[float]]:
    """Advantages as the stage makes them, by group."""
    rows = [
        (f"{number:03d}", f"{number:03d}-{index:03d}", "default", float(reward))
        for number, rewards in enumerate(groups)
        for index, reward in enumerate(rewards)
    ]
    frame = pl.DataFrame(rows, schema=["group_id", "episode_id", "trajectory", "reward"], orient="row")
    estimator = ESTIMATORS[name](**params)
    made = estimator.estimate(Samples(with_statistics(frame), no_scan)).sort("episode_id")
    zero = made["is_flat"] if estimator.compares_within_groups else made["is_flat"] & False
    made = made.with_columns(advantage=pl.when(zero).then(0.0).otherwise("advantage"))
    return [part["advantage"].to_list() for part in made.partition_by("group_id", maintain_order=True)]


def reference_grpo(rewards: list[float]) -> list[float]:
    if len(rewards) == 1 or len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def reference_population(rewards: list[float]) -> list[float]:
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [(reward - mean) / (statistics.pstdev(rewards) + 1e-6) for reward in rewards]


def reference_rloo(rewards: list[float]) -> list[float]:
    if len(rewards) == 1 or len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    return [
        reward - math.fsum(rewards[:index] + rewards[index + 1 :]) / (len(rewards) - 1)
        for index, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("name", "params", "reference"),
    [
        ("grpo", {}, reference_grpo),
        ("grpo", {"std": "population"}, reference_population),
        ("rloo", {}, reference_rloo),
    ],
)
@given(groups=GROUPS)
@settings(deadline=None)
def test_same_numbers_as_a_slow_reference(
    name: str, params: dict[str, str], reference: Callable[[list[float]], list[float]], groups: list[list[float]]
) -> None:
    for made, rewards in zip(estimated(name, groups, **params), groups, strict=True):
        size = max(map(abs, rewards))
        assert made == pytest.approx(reference(rewards), rel=1e-9, abs=1e-9 * (size if name == "rloo" else 1.0))


@given(groups=GROUPS)
@settings(deadline=None)
def test_reinforce_subtracts_the_mean_of_the_whole_batch(groups: list[list[float]]) -> None:
    everything = [reward for rewards in groups for reward in rewards]
    mean = math.fsum(everything) / len(everything)
    assert estimated("reinforce", groups) == [[reward - mean for reward in rewards] for rewards in groups]
    assert estimated("reinforce", groups, baseline="none") == groups


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@given(groups=GROUPS)
@settings(deadline=None)
def test_advantages_of_a_group_sum_to_zero(name: str, groups: list[list[float]]) -> None:
    for made, rewards in zip(estimated(name, groups), groups, strict=True):
        assert math.fsum(made) == pytest.approx(0.0, abs=1e-8 * max(1.0, *map(abs, rewards)))


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce"])
@given(groups=GROUPS, data=st.data())
@settings(deadline=None)
def test_the_order_of_attempts_changes_nothing(name: str, groups: list[list[float]], data: st.DataObject) -> None:
    orders = [data.draw(st.permutations(range(len(rewards)))) for rewards in groups]
    shuffled = [[rewards[index] for index in order] for rewards, order in zip(groups, orders, strict=True)]
    straight = estimated(name, groups)
    for order, made, expected in zip(orders, estimated(name, shuffled), straight, strict=True):
        size = max(1.0, *(abs(reward) for rewards in groups for reward in rewards))
        assert made == pytest.approx([expected[index] for index in order], rel=1e-9, abs=1e-9 * size)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@given(rewards=st.lists(st.integers(-100, 100), min_size=1, max_size=9), shift=st.integers(-1000, 1000))
@settings(deadline=None)
def test_a_constant_added_to_all_rewards_changes_nothing(name: str, rewards: list[int], shift: int) -> None:
    plain = estimated(name, [[float(reward) for reward in rewards]])[0]
    assert estimated(name, [[float(reward + shift) for reward in rewards]])[0] == pytest.approx(plain, abs=1e-9)


@given(rewards=st.lists(st.integers(-100, 100), min_size=2, max_size=9), scale=st.sampled_from([0.25, 2.0, 64.0]))
@settings(deadline=None)
def test_scaling_all_rewards_scales_rloo_and_leaves_grpo(rewards: list[int], scale: float) -> None:
    plain, scaled = [float(reward) for reward in rewards], [reward * scale for reward in rewards]
    assert estimated("rloo", [scaled])[0] == pytest.approx([scale * a for a in estimated("rloo", [plain])[0]])
    unscaled = estimated("grpo", [plain], eps=0)[0]
    assert estimated("grpo", [scaled], eps=0)[0] == pytest.approx(unscaled, rel=1e-12, abs=1e-12)


@given(groups=GROUPS, threshold=REWARD)
@settings(deadline=None)
def test_rejection_chooses_at_most_one_a_group_and_a_best_one(groups: list[list[float]], threshold: float) -> None:
    for made, rewards in zip(estimated("rejection", groups, threshold=threshold), groups, strict=True):
        chosen = [reward for reward, advantage in zip(rewards, made, strict=True) if advantage == 1.0]
        assert chosen == ([max(rewards)] if max(rewards) >= threshold else [])
        assert set(made) <= {0.0, 1.0}
    for made, rewards in zip(estimated("rejection", groups, choose="all", threshold=threshold), groups, strict=True):
        assert made == [float(reward >= threshold) for reward in rewards]
