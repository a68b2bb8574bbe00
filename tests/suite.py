"""The suite as a whole: which tests share a process, which begin first, and what may be left when it has ended.

A pytest plugin; ``tests/conftest.py`` loads it. With ``-n N`` (pytest-xdist) the tests of a file run one after the
other in one process, as they share what the file's fixtures start; ``pytest.mark.xdist_group`` puts files together.
"""

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages.rollouts.processes import is_running, name_of

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take minutes begin first, so that no process is left alone with one of them at the end."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    groups: dict[str, int] = {}
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        groups[_group(item)] = groups.get(_group(item), 0) + is_slow
    items.sort(key=lambda item: -groups[_group(item)])  # stable: within a file the order stays


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


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
    while left := [one for one in _processes_with(wanted) if is_running(one) and not _is_helper_of_python(one)]:
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


def _is_helper_of_python(process_id: int) -> bool:
    """Whether multiprocessing keeps it for this process, with which it ends."""
    return "from multiprocessing." in name_of(process_id)


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
