"""Files of tasks, wherever they lie: found, copied to this machine once, and known by their content.

A remote file is read into a local cache under its digest; a local one is used where it is.
"""

import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from schemas.errors import InputError, NotFoundError
from stages.artifacts.cache import cache_root

_CHUNK = 1 << 20


def is_local(location: str) -> bool:
    return "://" not in location or location.startswith("file://")


def content_digest(location: str) -> str:
    """SHA-256 of the file's bytes now; a remote file is read whole, and kept for ``local_file``.

    Raises:
        NotFoundError: there is no such file.
        InputError: it cannot be read.
    """
    if is_local(location):
        return _digest_of(_local_path(location))
    return _download(location)


def local_file(location: str, digest: str) -> Path:
    """A local file with exactly this content.

    Raises:
        InputError: the file at ``location`` has other content by now.
    """
    if is_local(location):
        path, found = _local_path(location), content_digest(location)
    else:
        path = _cache_folder() / digest
        found = digest if path.exists() else _download(location)
    if found != digest:
        raise InputError(
            f"{location} has changed: its digest is {found[:12]}, and was {digest[:12]} when the work was planned",
            hint="restore the file, or start the command anew to take the new content",
        )
    return path


def exists(location: str) -> bool:
    """Whether a local file is there; a remote one counts as there until it is read."""
    return not is_local(location) or _local_path(location).exists()


def _local_path(location: str) -> Path:
    return Path(location.removeprefix("file://")).expanduser()


def _digest_of(path: Path) -> str:
    try:
        stat = path.stat()
        return _digest_at(str(path), stat.st_size, stat.st_mtime_ns)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


@lru_cache(maxsize=256)
def _digest_at(path: str, size: int, changed_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(location: str) -> str:
    folder = _cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder, prefix="partial-")
    try:
        with os.fdopen(descriptor, "wb") as target:
            digest = _copy(location, target)
        os.replace(name, folder / digest)
    finally:
        Path(name).unlink(missing_ok=True)
    return digest


def _copy(location: str, target: BinaryIO) -> str:
    import fsspec

    hasher = hashlib.sha256()
    try:
        source: Any
        with fsspec.open(location, "rb") as source:
            while chunk := source.read(_CHUNK):
                hasher.update(chunk)
                target.write(chunk)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {location}") from None
    except ImportError as error:
        raise InputError(f"{location} cannot be read: {error}", hint="install rollmill[s3] or rollmill[hub]") from None
    except Exception as error:  # each file system has errors of its own
        raise InputError(f"{location} cannot be read: {type(error).__name__}: {error}") from error
    return hasher.hexdigest()


def _cache_folder() -> Path:
    return cache_root() / "sources"
