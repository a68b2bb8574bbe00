"""The one door to storage: create once, read, list, delete. Nothing else in Rollmill opens a stored path.

A storage must offer one thing that many do not: ``put_if_absent`` creates an object whole or not at
all, and tells the second writer that it came second. Everything else on the shelf is built on it.
Paths are relative to the store's root, with ``/`` between segments.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from schemas.errors import StoreError

TEMPORARY = ".tmp-"
"""Prefix of the names of files that are nobody's data; garbage collection removes old ones."""


@dataclass(frozen=True)
class Entry:
    """One stored object as a listing shows it."""

    path: str
    bytes: int
    modified: float
    """Seconds since the epoch, by the storage's own clock."""


class Storage(ABC):
    """Where a store lies. Missing objects are ``FileNotFoundError``, every other fault a ``StoreError``."""

    url: str
    """How people name it; never holds a credential."""

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes | Path) -> bool:
        """Creates ``path`` with all of ``data`` (bytes, or a finished local file), durable on return.

        Returns:
            True: created by this call. False: something is there; it was not touched. After a lost
            response that can be this call's own object, so read it back before believing in a rival.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The whole object."""

    @abstractmethod
    def download(self, path: str, target: Path) -> None:
        """Copies the object into the local file ``target``."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether an object (not a folder) is there, past every cache."""

    @abstractmethod
    def entries(self, folder: str) -> Iterator[Entry]:
        """Every object below ``folder``, at any depth, in no order; nothing where there is no such folder."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Names directly below ``folder``, files and folders, sorted; empty where there is no such folder."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Removes one object; one that is gone already is no fault."""

    @abstractmethod
    def open_for_writing(self) -> None:
        """Makes sure that the root can be written, creating what a root needs.

        Raises:
            StoreError: it cannot be written.
        """

    @abstractmethod
    def root_exists(self) -> bool:
        """Whether there is a store at all; object stores answer True where the bucket exists."""

    def close_after_test(self) -> None:
        """Undoes ``open_for_writing`` as far as nothing has been written since."""
        return

    def scratch_parent(self) -> Path | None:
        """Where to make files that will be put: from there they are linked and not copied; None: anywhere."""
        return None

    def local_path(self, path: str) -> Path | None:
        """The object as a file of this machine; None where it is none."""
        return None

    def polars_source(self, path: str) -> tuple[Any, dict[str, Any]]:
        """What ``pl.scan_parquet`` needs to read the object lazily: a source, and options without secrets."""
        return self.read(path), {}


def open_storage(url: str, *, single_writer: bool = False) -> Storage:
    """The storage behind a store's URL; a path without a scheme is a local folder.

    Args:
        single_writer: the user vouches that one process at a time writes here, so that a storage without
            exclusive creation will do.
    Raises:
        StoreError: the URL is malformed, holds a credential, or its library is not installed.
    """
    scheme, _, rest = url.partition("://")
    if not rest and "://" not in url:
        scheme, rest = "file", url
    if scheme != "file" and ("@" in urlsplit(url).netloc or "?" in url):
        raise StoreError(
            f"the store URL {scheme}://… holds a credential or options",
            hint="give credentials through the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, …), never in the URL",
        )
    if scheme in ("file", "local"):
        from stages.artifacts.storage_local import LocalStorage

        return LocalStorage(rest or ".", single_writer=single_writer)
    if scheme == "memory":
        from stages.artifacts.storage_memory import MemoryStorage

        return MemoryStorage(rest)
    from stages.artifacts.storage_fsspec import FsspecStorage

    return FsspecStorage(url, single_writer=single_writer)


def contained(path: str, url: str) -> str:
    """``path`` itself, if it stays below the root.

    Raises:
        StoreError: it does not.
    """
    if path.startswith("/") or ".." in path.split("/"):
        raise StoreError(f"the path {path!r} would leave the store {url}")
    return path


def check_exclusive(storage: Storage) -> bool:
    """Whether the storage keeps its promise: creates the same object twice, and the second time must fail.

    Some S3-compatible servers answer 200 to a conditional write and overwrite. Leaves nothing behind.
    """
    storage.open_for_writing()
    path = f"{TEMPORARY}test-{secrets.token_hex(16)}"
    try:
        storage.put_if_absent(path, b"first")
    except StoreError:  # there is nothing to clean up, or no way to reach it
        storage.close_after_test()
        raise
    try:
        second = storage.put_if_absent(path, b"second")
        return not second and storage.read(path) == b"first"
    except FileNotFoundError:
        return False
    finally:
        storage.delete(path)
        storage.close_after_test()
