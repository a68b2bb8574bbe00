"""The learning rate at a step."""

import math

from stages.policy.settings import ScheduleConfig


def lr_at(step: int, lr: float, schedule: ScheduleConfig) -> float:
    """Learning rate of the optimizer step number ``step``, counted from 1."""
    if step <= schedule.warmup_steps:
        return lr * step / schedule.warmup_steps
    if schedule.total_steps is None:
        return lr
    span = max(1, schedule.total_steps - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / span)
    left = 1 - done if schedule.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return lr * (schedule.floor + (1 - schedule.floor) * left)
