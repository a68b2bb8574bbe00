"""Folders in the system's temporary directory that no command leaves there for good, however it ends.

A folder holds a file on which its owner has a lock. The kernel lets go of the lock when the owner dies, whatever kills
it, and the next command that wants such a folder removes those that nobody holds.
"""

import fcntl
import os
import platform
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "rollmill-"
OWNER = "owner"
"""The file with the lock. It names the owner's machine: where several share the directory, a lock may not be seen."""

_SWEPT: set[str] = set()
_HELD: set[int] = set()
"""Descriptors of this process's own locks."""


class TemporaryFolder:
    """A new folder, for a ``with`` statement or until ``remove``; the first of a process removes what was abandoned."""

    def __init__(self, purpose: str):
        _sweep_once(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        self._process = os.getpid()
        self._lock = _locked(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes it with all that is in it; a forked process leaves what is its parent's."""
        if os.getpid() != self._process:
            return
        with suppress(OSError):  # whatever cannot be removed now is abandoned from here on
            folder = _opened(self.path)
            try:
                _remove(self.path, folder)
            finally:
                os.close(folder)
        if self._lock is not None:
            _HELD.discard(self._lock)
            os.close(self._lock)
            self._lock = None


def _locked(folder: Path) -> int | None:
    """Makes the owner's file; None where the file system has no locks: such a folder is never taken for abandoned."""
    new = folder / f"{OWNER}-new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, platform.node().encode())
        new.rename(folder / OWNER)  # only now: a file of this name without a lock is an abandoned one
    except OSError:
        os.close(lock)
        return None
    _HELD.add(lock)
    return lock


def _let_go() -> None:
    """In a forked process: its copies of the locks would hold them beyond the owner's end."""
    for lock in _HELD:
        os.close(lock)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)


def _sweep_once(directory: str) -> None:
    if directory in _SWEPT:
        return
    _SWEPT.add(directory)
    with os.scandir(directory) as entries:
        names = [entry.path for entry in entries if entry.name.startswith(PREFIX)]
    for name in names:
        # Another command may be removing the same one. Too deep a folder, which hostile code may have made, is left.
        with suppress(OSError, RecursionError):
            _remove_if_abandoned(Path(name))


def _remove_if_abandoned(path: Path) -> None:
    folder = _opened(path)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        owner = os.open(OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody has it
            found = os.fstat(owner)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
            if is_ours and os.read(owner, 1024) == platform.node().encode():
                _remove(path, folder)
        finally:
            os.close(owner)
    finally:
        os.close(folder)


def _opened(path: Path) -> int:
    """A descriptor of a real folder, by which its entries are reached whatever becomes of the path."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove(path: Path, folder: int) -> None:
    """The owner's file goes last: what a removal that is cut short leaves is still known as abandoned."""
    for name in os.listdir(folder):
        if name == OWNER:
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            _remove_tree(name, folder)
        else:
            os.unlink(name, dir_fd=folder)
    if set(os.listdir(folder)) <= {OWNER}:
        with suppress(FileNotFoundError):
            os.unlink(OWNER, dir_fd=folder)
        path.rmdir()


def _remove_tree(name: str, parent: int) -> None:
    with suppress(PermissionError):
        shutil.rmtree(name, dir_fd=parent)
        return
    # Folders that their maker had closed to its own user, as caches of packages are
    os.chmod(name, stat.S_IRWXU, dir_fd=parent)
    for _, names, _, folder in os.fwalk(name, dir_fd=parent):
        for one in names:
            if stat.S_ISDIR(os.stat(one, dir_fd=folder, follow_symlinks=False).st_mode):
                os.chmod(one, stat.S_IRWXU, dir_fd=folder)
    shutil.rmtree(name, dir_fd=parent)
