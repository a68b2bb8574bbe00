import pytest

from stages.policy.schedule import lr_at
from stages.policy.settings import ScheduleConfig


def rates(schedule: ScheduleConfig, steps: list[int]) -> list[float]:
    return [lr_at(step, 2.0, schedule) for step in steps]


def test_the_rate_rises_over_the_warm_up_and_stays() -> None:
    assert rates(ScheduleConfig(warmup_steps=4), [1, 2, 4, 5, 1000]) == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_the_rate_falls_linearly_to_its_floor() -> None:
    schedule = ScheduleConfig(warmup_steps=2, decay="linear", total_steps=12, floor=0.1)
    assert rates(schedule, [2, 7, 12, 50]) == pytest.approx([2.0, 1.1, 0.2, 0.2])


def test_the_rate_falls_as_a_cosine() -> None:
    assert rates(ScheduleConfig(decay="cosine", total_steps=10), [5, 10]) == pytest.approx([1.0, 0.0])
