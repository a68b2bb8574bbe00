"""Temporary folders go with their owner or at the next command, and nothing else does."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stages.artifacts import temporary
from stages.artifacts.temporary import OWNER, PREFIX, TemporaryFolder

OWNING = """
import os, sys, time
from stages.artifacts.temporary import TemporaryFolder

folder = TemporaryFolder("test")
(folder.path / "closed").mkdir()
(folder.path / "closed" / "file").write_text("x")
if len(sys.argv) > 1 and os.fork() == 0:
    time.sleep(600)
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, for this test and the processes that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


Started = tuple["subprocess.Popen[str]", Path]


@pytest.fixture
def owning() -> Iterator[Callable[..., Started]]:
    """Starts a process that has a temporary folder; gives both."""
    started = []

    def start(*arguments: str) -> Started:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNING, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def swept(directory: Path) -> set[str]:
    """What is there after a command that had a temporary folder of its own."""
    temporary._SWEPT.clear()
    with TemporaryFolder("next") as folder:
        assert folder.is_dir()
    assert not folder.exists()
    return {path.name for path in directory.iterdir()}


def abandoned(directory: Path, name: str = "made", machine: str = platform.node()) -> Path:
    """A folder as a killed command leaves it."""
    folder = directory / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / OWNER).write_text(machine)
    (folder / "file").write_text("x")
    return folder


def test_a_folder_is_there_while_it_is_used_and_gone_with_all_that_is_in_it(directory):
    with TemporaryFolder("test") as folder:
        assert folder.parent == directory
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "file").write_text("x")
        (folder / "a" / "b").chmod(0)
        (folder / "a").chmod(0o500)
    assert list(directory.iterdir()) == []


def test_the_next_command_removes_what_a_killed_one_has_left_and_nothing_of_a_living_one(directory, owning):
    (killed, left), (_, used) = owning(), owning()
    killed.kill()
    killed.wait()
    assert left.name in {path.name for path in directory.iterdir()}
    assert swept(directory) == {used.name}
    assert (used / "closed" / "file").exists()


def test_processes_that_a_killed_one_had_forked_do_not_keep_its_folder(directory, owning):
    process, left = owning("with a child")
    assert swept(directory) == {left.name}
    process.kill()
    process.wait()
    os.killpg(process.pid, 0)  # the child is alive
    assert swept(directory) == set()


def test_a_forked_process_leaves_its_parents_folder(directory):
    folder = TemporaryFolder("test")
    child = os.fork()
    if child == 0:
        folder.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert swept(directory) == {folder.path.name}
    folder.remove()
    assert swept(directory) == set()


def test_what_was_only_half_removed_goes(directory):
    left = abandoned(directory)
    (left / "file").unlink()
    assert swept(directory) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / OWNER).unlink(),
        lambda folder: (folder / OWNER).write_text("another machine"),
        lambda folder: folder.rename(folder.with_name("other-" + folder.name)),
        lambda folder: ((folder / OWNER).rename(folder / "real"), (folder / OWNER).symlink_to("real")),
        lambda folder: os.link(folder / OWNER, folder / "second"),
        lambda folder: ((folder / OWNER).unlink(), (folder / OWNER).mkdir()),
        lambda folder: ((folder / OWNER).unlink(), os.mkfifo(folder / OWNER)),
    ],
    ids=["no owner", "another machine", "another name", "a link", "linked twice", "a folder", "a pipe"],
)
def test_what_is_not_known_as_abandoned_stays(directory, change):
    folder = abandoned(directory)
    change(folder)
    before = sorted(directory.rglob("*"))
    swept(directory)
    assert sorted(directory.rglob("*")) == before


def test_what_belongs_to_another_user_stays(directory, monkeypatch):
    folder = abandoned(directory)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert swept(directory) == {folder.name}


def test_links_are_not_followed(directory, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(abandoned(directory), elsewhere)
    (directory / f"{PREFIX}link").symlink_to(elsewhere)
    left = abandoned(directory)
    (left / "to-a-folder").symlink_to(elsewhere)
    (left / "to-a-file").symlink_to(elsewhere / "file")
    (left / "deep").mkdir()
    (left / "deep" / "link").symlink_to(elsewhere)
    assert swept(directory) == {f"{PREFIX}link"}
    assert {path.name for path in elsewhere.iterdir()} == {OWNER, "file"}
