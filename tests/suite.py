"""The suite as a whole: which tests share a process, which begin first, and what may be left when it has ended.

A pytest plugin; ``tests/conftest.py`` loads it. With ``-n N`` (pytest-xdist) the tests of a file run one after the
other in one process, as they share what the file's fixtures start; those of all files ``*_live.py`` share one process.
"""

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.stages.rollouts.processes import descendants, is_running, name_of

MARK = "ROLLMILL_TEST_SUITE"
"""An environment variable that every process of the suite inherits, by which those that outlive it are found."""
MOST_LEFT_BYTES = 100 * 2**20
"""In the temporary folder, beside what pytest itself keeps of tests that failed."""
_END_S = 20.0

# One thread a process: tests have tiny tensors, and threads of several processes that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """A temporary folder for all that the suite starts; pytest keeps its own where it always does."""
    if not _is_worker(config):
        os.environ[MARK] = secrets.token_hex(8)
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="rollmill-tests-")
    # Prefect reads its settings when it is imported: its database must be a temporary one before any test does that.
    os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-")


class _ByFile(LoadScopeScheduling):
    """Gives each process a file after the other, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    config.option.loadscopereorder = False
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take minutes begin first, so that no process is left alone with one of them at the end."""
    n_slow: dict[str, int] = {}
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        n_slow[_group(item.nodeid)] = n_slow.get(_group(item.nodeid), 0) + is_slow
    items.sort(key=lambda item: -n_slow[_group(item.nodeid)])  # stable: within a file the order stays


def _group(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return "live" if file.endswith("_live.py") else file


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """After everything else has ended: no process of the suite is alive, and little is left in the temporary folder."""
    yield
    if _is_worker(session.config):
        return
    problems = [*_processes_left(), *_bytes_left(Path(tempfile.gettempdir()))]
    for problem in problems:
        print(f"\nafter the suite: {problem}", file=sys.stderr)
    if problems:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests were skipped, as the data of ../shared/data is not there")


def _processes_left() -> list[str]:
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    until = time.monotonic() + _END_S
    own = descendants(os.getpid())  # they end with this process, as a trainer that is kept warm does
    while left := [one for one in _processes_with(wanted) if is_running(one) and one not in own]:
        if time.monotonic() > until:
            return [f"process {one} is alive: {name_of(one)[:200]}" for one in left]
        time.sleep(0.2)
    return []


def _processes_with(variable: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        if variable in environment and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def _bytes_left(folder: Path) -> list[str]:
    by_entry = {
        entry.name: sum(file.lstat().st_size for file in [entry, *entry.rglob("*")])
        for entry in folder.iterdir()
        if not entry.name.startswith("prefect-")  # of this suite's own processes, removed below
    }
    if sum(by_entry.values()) <= MOST_LEFT_BYTES:
        return []
    largest = sorted(by_entry.items(), key=lambda each: -each[1])[:5]
    told = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in largest)
    return [f"more than {MOST_LEFT_BYTES / 2**20:.0f} MiB are left in {folder}: {told}"]


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
