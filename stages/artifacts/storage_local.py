"""Storage in a local folder: a temporary file, fsync, a hard link to the final name, fsync of the folder.

``os.link`` is the one local operation that creates a name only where there is none and shows readers
nothing but the whole file.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.errors import StoreError
from stages.artifacts.storage import TEMPORARY, Entry, Storage, contained

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStorage(Storage):
    """A folder of a file system with hard links."""

    def __init__(self, root: str | Path, *, single_writer: bool = False):
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self.url = str(self.root)
        self._single_writer = single_writer
        self._created_root = False

    def put_if_absent(self, path: str, data: bytes | Path) -> bool:
        final = self._at(path)
        temporary = final.parent / f"{TEMPORARY}{secrets.token_hex(16)}"
        changed = [final.parent]
        try:
            for attempt in (1, 2, 3):
                try:
                    created = self._put(temporary, final, data)
                    for folder in changed if created else ():
                        _sync_folder(folder)
                    return created
                except FileNotFoundError:
                    if attempt == 3 or (isinstance(data, Path) and not data.exists()):
                        raise
                    changed += _make_folder(final.parent)
        except (PermissionError, NotADirectoryError) as error:
            raise StoreError(f"{final} cannot be written: {error.strerror}") from error
        except OSError as error:
            if error.errno in _FULL:
                raise StoreError(f"{final} cannot be written: {error.strerror}") from error
            raise
        raise AssertionError("not reached")

    def read(self, path: str) -> bytes:
        return self._at(path).read_bytes()

    def download(self, path: str, target: Path) -> None:
        shutil.copyfile(self._at(path), target)

    def exists(self, path: str) -> bool:
        return self._at(path).is_file()

    def entries(self, folder: str) -> Iterator[Entry]:
        start = self._at(folder)
        pending = [start]
        while pending:
            try:
                found = list(os.scandir(pending.pop()))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for item in found:
                if item.is_dir(follow_symlinks=False):
                    pending.append(Path(item.path))
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted by another process since
                    status = item.stat(follow_symlinks=False)
                    yield Entry(Path(item.path).relative_to(self.root).as_posix(), status.st_size, status.st_mtime)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._at(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, path: str) -> None:
        target = self._at(path)
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        for parent in target.parents:  # an object store has no empty folders either
            if parent == self.root or self.root not in parent.parents:
                break
            try:
                parent.rmdir()
            except OSError:
                break

    def open_for_writing(self) -> None:
        self._created_root = not self.root.exists()
        try:
            _make_folder(self.root)
            if not self.root.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder")
        except OSError as error:
            raise StoreError(
                f"the store {self.url} cannot be written: {error.strerror}", hint="choose another folder with --store"
            ) from error

    def root_exists(self) -> bool:
        return self.root.is_dir()

    def close_after_test(self) -> None:
        if self._created_root:
            with contextlib.suppress(OSError):  # not empty: another process has begun to write
                self.root.rmdir()

    def scratch_parent(self) -> Path | None:
        return self.root

    def local_path(self, path: str) -> Path | None:
        return self._at(path)

    def polars_source(self, path: str) -> tuple[Any, dict[str, Any]]:
        return self._at(path), {}

    def _at(self, path: str) -> Path:
        return self.root / contained(path, self.url)

    def _put(self, temporary: Path, final: Path, data: bytes | Path) -> bool:
        if final.exists():
            return False
        is_scratch = isinstance(data, Path) and self._is_scratch(data)
        try:
            with open(data if is_scratch else temporary, "r+b" if is_scratch else "xb") as file:
                if isinstance(data, bytes):
                    file.write(data)
                elif not is_scratch:
                    with open(data, "rb") as source:
                        shutil.copyfileobj(source, file, 16 * 2**20)
                file.flush()
                os.fchmod(file.fileno(), 0o444)
                os.fsync(file.fileno())
            try:
                os.link(data if is_scratch else temporary, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if not self._single_writer:
                    raise StoreError(
                        f"the file system of {self.url} has no hard links, so two writers could overwrite each other",
                        hint="use another folder, or accept one writer at a time (single_writer)",
                    ) from error
                os.rename(data if is_scratch else temporary, final)
            return True
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    def _is_scratch(self, path: Path) -> bool:
        """Whether the file was made in this store's scratch folder and is nobody else's (no link to a user's file)."""
        if self.root not in path.parents or not path.relative_to(self.root).parts[0].startswith(TEMPORARY):
            return False
        return not path.is_symlink() and path.stat().st_nlink == 1


def _make_folder(folder: Path) -> list[Path]:
    """Makes the folder and those above it; returns the folders that gained an entry, to be synced."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for child in reversed(missing):
        with contextlib.suppress(FileExistsError):
            child.mkdir()
    return [child.parent for child in missing]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
