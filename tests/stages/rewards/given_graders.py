"""Graders as users write them, good and bad; ``t001-1`` is the episode that the bad ones fail on."""

import asyncio
import contextlib
import ctypes
import itertools
import os
import sys
import time
from pathlib import Path

from stages.rewards.sdk import Episode, EvalOutput, Signal, Task, Trajectory, evaluator

GUILTY = "t001-1"


@evaluator
def even(task: Task, episode: Episode) -> float:
    """0.25 for an even answer."""
    return 0.25 if int(episode.response or 1) % 2 == 0 else 0.0


@evaluator(version="2026-09")
def stated(task: Task, episode: Episode) -> bool:
    return episode.response == task.answer


def thorough(task: Task, episode: Episode, trajectory: Trajectory, *, bonus: float = 0.0) -> EvalOutput:
    """Everything a grader may give."""
    return EvalOutput(
        reward=1.0 + bonus,
        is_correct=True,
        verdict="correct",
        explanation=f"{trajectory.name} of {task.metadata['index']}",
        signals=[Signal("length", len(trajectory.response or "")), Signal("pid", os.getpid())],
        step_rewards={0: 0.5},
    )


async def patient(task: Task, episode: Episode) -> tuple[float, bool]:
    await asyncio.sleep(0)
    return 0.75, False


def by_role(task: Task, episode: Episode) -> dict[str, float]:
    """Says what each trajectory is worth, and forgets the judge."""
    return {"solver": 1.0, "critic": 0.5}


def counts_tokens(task: Task, episode: Episode, trajectory: Trajectory) -> float:
    return float(len(trajectory.steps[-1].response_ids))


def loops(task: Task, episode: Episode) -> float:
    while episode.id == GUILTY:
        pass
    return 1.0


def loops_and_swallows(task: Task, episode: Episode) -> float:
    while episode.id == GUILTY:
        with contextlib.suppress(Exception):
            time.sleep(30)
    return 1.0


def loops_in_c(task: Task, episode: Episode) -> float:
    """No signal handler runs in here, and no other thread."""
    return float(sum(itertools.repeat(1)) if episode.id == GUILTY else 1)


def hoards(task: Task, episode: Episode) -> float:
    return float(len(bytearray(2**40)) if episode.id == GUILTY else 1)


def crashes(task: Task, episode: Episode) -> float:
    if episode.id == GUILTY:
        ctypes.string_at(0)
    return 1.0


def raises(task: Task, episode: Episode) -> float:
    if episode.id == GUILTY:
        raise LookupError("no such \ud800 thing")
    return 1.0


def leaves(task: Task, episode: Episode) -> float:
    if episode.id == GUILTY:
        sys.exit(3)
    return 1.0


def not_a_number(task: Task, episode: Episode) -> float:
    return float("nan") if episode.id == GUILTY else 1.0


def endless(task: Task, episode: Episode) -> float:
    return float("inf") if episode.id == GUILTY else 1.0


def wordy(task: Task, episode: Episode) -> str | float:
    return "very good" if episode.id == GUILTY else 1.0


def beyond_the_steps(task: Task, episode: Episode) -> EvalOutput:
    return EvalOutput(1.0, step_rewards={7: 1.0} if episode.id == GUILTY else {})


def one_argument(task: Task) -> float:
    return 1.0


def marks_its_process(task: Task, episode: Episode, *, folder: str) -> float:
    """Leaves a file named after the process that ran it."""
    Path(folder, str(os.getpid())).touch()
    return 1.0
