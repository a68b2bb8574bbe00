"""One stage as a process of its own that kills itself, with no chance to tidy up, at a chosen point of its work."""

import fnmatch
import multiprocessing
import os
import signal
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.artifacts.storage import Storage
from tests.stages.artifacts.faults import FaultyStorage

POINTS = {
    "before the plan": ("before", "*/plan.json"),
    "after the plan": ("after", "*/plan.json"),
    "in the work": ("progress", ""),
    "after the first file": ("after", "*/data/*"),
    "after the first receipt": ("after", "*/receipts/*"),
    "before the manifest": ("before", "*/manifest.json"),
}
"""What happens there, and to which path of the store."""

MARK = "ROLLMILL_TEST_MARK"
"""An environment variable that every process started by the stage inherits."""

_HEAVY = ["torch", "transformers", "flows.call", "stages.policy.training", "stages.rollouts.engines.transformers"]


@dataclass(frozen=True)
class StageWork:
    """A stage to run, as a user asks for it."""

    name: str
    inputs: dict[str, str | list[str]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    execution: dict[str, Any] = field(default_factory=dict)


def run_in_a_process(
    url: str, work: StageWork, point: str | None = None, mark: str = "", timeout_s: float = 300
) -> int:
    """Does the work in another process; returns its exit code (negative: the signal that killed it).

    The process is forked from a server that has imported everything heavy, and has used none of it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_HEAVY, __name__])
    process = context.Process(target=_run, args=(url, work, point, mark))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{work.name} did not end within {timeout_s} s")
    return process.exitcode


def processes_with(mark: str) -> list[int]:
    """Processes whose environment holds ``mark``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        if f"{MARK}={mark}".encode() in environment:
            found.append(int(folder.name))
    return found


class KilledAt(FaultyStorage):
    """Kills the process before or after the first change of a path that matches."""

    def __init__(self, inner: Storage, when: str, pattern: str):
        super().__init__(inner)
        self._when, self._pattern = when, pattern

    def put_if_absent(self, path: str, data: bytes | Path) -> bool:
        self._reached("before", path)
        created = super().put_if_absent(path, data)
        self._reached("after", path)
        return created

    def _reached(self, when: str, path: str) -> None:
        if when == self._when and fnmatch.fnmatch(path, self._pattern):
            os.kill(os.getpid(), signal.SIGKILL)


def _run(url: str, work: StageWork, point: str | None, mark: str) -> None:
    try:
        _materialise(url, work, point, mark)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # a forked process cannot wait for the threads of libraries that do not know of the fork


def _materialise(url: str, work: StageWork, point: str | None, mark: str) -> None:
    from flows.call import stage_request
    from stages.artifacts.commit import materialise
    from stages.artifacts.store import open_store

    os.environ[MARK] = mark
    store = open_store(url)
    request = stage_request(store, work.name, inputs=work.inputs, config=work.config, execution=work.execution)
    when, pattern = POINTS[point] if point else ("never", "")
    store.storage = KilledAt(store.storage, when, pattern)

    def progress(shard: str, done: int, total: int) -> None:
        if when == "progress":
            os.kill(os.getpid(), signal.SIGKILL)

    materialise(store, request, progress=progress)
