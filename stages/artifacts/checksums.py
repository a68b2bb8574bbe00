"""SHA-256 of stored files, and many storage calls at once where each has to cross a network."""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from stages.artifacts.storage import Storage

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
    with tempfile.TemporaryDirectory(prefix="rollmill-") as folder:
        copy = Path(folder) / "copy"
        storage.download(path, copy)
        return file_checksum(copy), copy.stat().st_size


def each(storage: Storage, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``function`` of every item, in order; side by side unless the storage is a local folder."""
    if len(items) < 2 or storage.local_path("x") is not None:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(N_REMOTE_CALLS, len(items))) as pool:
        return list(pool.map(function, items))
