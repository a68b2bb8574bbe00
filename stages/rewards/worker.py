"""The inside of a grading worker: limits, the loaded graders, and the grading of one chunk.

Only this process ever runs a grader. It imports no Arrow and no store, so that it starts quickly.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from schemas.loading import is_user_code
from schemas.records import Episode, Task, Trajectory
from stages.rewards.functions import load_function, source_version
from stages.rewards.graders import GRADERS
from stages.rewards.outcome import Outcome, fault_of, outcome_of

LOAD_LIMIT_S = 120.0
"""Longest time that importing a grader may take."""


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told when it starts; workers with other settings belong to another pool."""

    graders: tuple[str, ...]
    params: str
    """Canonical JSON of the parameters; they go to each of the graders."""
    version: str | None
    """Version that a user's function must still have; None: only built-in graders."""
    memory_mb: int


@dataclass
class Item:
    """One episode to grade, as far as ``trajectories`` names it, with the grader called ``grader``."""

    task: Task
    episode: Episode
    grader: str
    trajectories: tuple[str, ...]


@dataclass
class _Loaded:
    grade: Callable[..., Any]
    per_trajectory: bool
    params: dict[str, Any] = field(default_factory=dict)


class TimeLimitReached(BaseException):
    """Not an ``Exception``: a grader's own ``except Exception`` must not swallow it."""


_loaded: dict[str, _Loaded] = {}
_load_fault: str | None = None
_devnull: TextIO | None = None


def start(settings: WorkerSettings) -> None:
    """Sets the limits and loads the graders. A grader that cannot be loaded is told by ``load_fault``."""
    global _load_fault, _devnull
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # dies at once, also inside C code
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.stdout = sys.stderr
    sys.path.append(os.getcwd())
    limit = settings.memory_mb * 2**20
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ValueError, OSError):  # systems whose kernel has no such limit
        pass
    _devnull = open(os.devnull, "w")  # noqa: SIM115  (lives as long as the process)
    faulthandler.dump_traceback_later(LOAD_LIMIT_S, exit=True, file=_devnull)
    try:
        for name in settings.graders:
            _loaded[name] = _load(name, settings)
    except BaseException as error:
        _load_fault = f"{type(error).__name__}: {error}"
    faulthandler.cancel_dump_traceback_later()


def load_fault() -> str | None:
    """Why the graders cannot be used; None: they can."""
    return _load_fault


def grade_chunk(items: list[Item], timeout_s: float, hard_timeout_s: float) -> list[list[Outcome]]:
    """The outcomes of each item, in order.

    Args:
        timeout_s: after this time a call is interrupted and its trajectory gets the status ``timeout``.
        hard_timeout_s: after this time a call that cannot be interrupted ends the whole process.
    """
    if _load_fault is not None:
        raise RuntimeError(_load_fault)
    return [_grade(item, timeout_s, hard_timeout_s) for item in items]


def _end_with_parent(parent_id: int) -> None:
    """A grader may work for long: when the pipeline's process is gone, nobody waits for it."""
    while os.getppid() == parent_id:
        time.sleep(0.5)
    os._exit(1)


def _load(name: str, settings: WorkerSettings) -> _Loaded:
    params = json.loads(settings.params)
    if not is_user_code(name):
        grader = GRADERS[name](**params)
        grader.prepare()
        return _Loaded(grader, per_trajectory=True)
    if source_version(name) != settings.version:
        raise RuntimeError(f"the source of {name} has changed since its version was taken")
    grade, per_trajectory = load_function(name, params)
    return _Loaded(grade, per_trajectory, params)


def _grade(item: Item, timeout_s: float, hard_timeout_s: float) -> list[Outcome]:
    loaded = _loaded[item.grader]
    chosen = [trajectory for trajectory in item.episode.trajectories if trajectory.name in item.trajectories]
    outcomes = []
    for group in [[trajectory] for trajectory in chosen] if loaded.per_trajectory else [chosen]:
        arguments = (item.task, item.episode, *(group if loaded.per_trajectory else ()))
        began = time.perf_counter()
        try:
            returned = _limited(lambda a=arguments: _called(loaded, a), timeout_s, hard_timeout_s)  # type: ignore[misc]
            made = [_outcome(returned, trajectory) for trajectory in group]
        except TimeLimitReached:
            message = f"the grader took longer than {timeout_s:g} s"
            made = [Outcome(trajectory.name, "timeout", explanation=message) for trajectory in group]
        except BaseException as error:  # also SystemExit: whatever a grader raises is its own fault
            made = [fault_of(error, trajectory) for trajectory in group]
        duration_s = time.perf_counter() - began
        for outcome in made:
            outcome.duration_s = duration_s
        outcomes += made
    return outcomes


def _called(loaded: _Loaded, arguments: tuple[Any, ...]) -> Any:
    returned = loaded.grade(*arguments, **loaded.params)
    if inspect.isawaitable(returned):

        async def wait() -> Any:
            return await returned

        return asyncio.run(wait())
    return returned


def _outcome(returned: Any, trajectory: Trajectory) -> Outcome:
    """Of what a grader returned, for all trajectories alike or for each in a dict by name."""
    if isinstance(returned, Mapping):
        if trajectory.name not in returned:
            message = f"the grader returned no reward for the trajectory {trajectory.name!r}"
            return Outcome(trajectory.name, "error", explanation=message)
        returned = returned[trajectory.name]
    return outcome_of(returned, trajectory)


def _limited(call: Callable[[], Any], timeout_s: float, hard_timeout_s: float) -> Any:
    """The call's result, or ``TimeLimitReached``: by a timer that fires again, and past that by ending the process."""

    def expire(signum: int, frame: Any) -> None:
        raise TimeLimitReached

    def disarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    signal.signal(signal.SIGALRM, expire)
    try:
        try:
            faulthandler.dump_traceback_later(hard_timeout_s, exit=True, file=_devnull)  # type: ignore[arg-type]
            signal.setitimer(signal.ITIMER_REAL, timeout_s, 0.25)
            return call()
        finally:
            disarm()
    except TimeLimitReached:
        disarm()  # the timer may have fired again inside ``disarm``
        raise
