"""SHA-256 of stored files, and many storage calls at once where each has to cross a network."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from stages.artifacts.storage import Storage
from stages.artifacts.temporary import TemporaryFolder

N_REMOTE_CALLS = 16
"""Calls in flight at once to a storage that is not local."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def file_checksum(path: Path) -> str:
    """SHA-256 of a local file, read now."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stored_checksum(storage: Storage, path: str) -> tuple[str, int]:
    """SHA-256 and size of a stored file, read now and past every cache; FileNotFoundError where there is none."""
    local = storage.local_path(path)
    if local is not None:
        return file_checksum(local), local.stat().st_size
    with TemporaryFolder("copy") as folder:
        copy = folder / "copy"
        storage.download(path, copy)
        return file_checksum(copy), copy.stat().st_size


def each(storage: Storage, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``function`` of every item, in order; side by side unless the storage is a local folder."""
    return side_by_side(function, items, 1 if storage.local_path("x") is not None else N_REMOTE_CALLS)


def side_by_side(function: Callable[[Item], Result], items: Sequence[Item], n_threads: int) -> list[Result]:
    """``function`` of every item, in order, in up to ``n_threads`` threads."""
    if len(items) < 2 or n_threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(n_threads, len(items))) as pool:
        return list(pool.map(function, items))
