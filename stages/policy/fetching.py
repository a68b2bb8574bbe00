"""A model folder on remote storage, fetched once: later uses, and other processes meanwhile, share the local copy.

The copy is complete or not there: it is made beside its place, its checksums are written last, and it is renamed. What
the storage says of its files (size, ETag or time of change) is in the copy's name, so changed files are fetched anew.
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas.canonical import canonical_hash
from schemas.errors import CorruptError, InputError, NotFoundError
from stages.artifacts.cache import cache_root
from stages.artifacts.sweep import mark_used, sweep_once
from stages.policy.checkpoint import sha256_of

CHECKSUMS = "sha256sums"
_WANTED = (".json", ".jinja", ".txt", ".model", ".safetensors")
_MARKS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
"""What storages call that which changes with a file's content."""


def is_remote(location: str) -> bool:
    """Whether it is a URL of storage that is read through fsspec."""
    return "://" in location and not location.startswith("hf://")


def fetched_folder(location: str) -> Path:
    """A local folder, to be read only, with the model's files.

    Raises:
        NotFoundError: nothing lies there.
        InputError: it cannot be read.
        CorruptError: the local copy was changed since it was made.
    """
    with _told(location):
        from fsspec.core import url_to_fs

        storage, path = url_to_fs(location, use_listings_cache=False, skip_instance_cache=True)
        found = _listed(storage, path)
    if not found:
        raise NotFoundError(f"there is no model at {location}", hint="give the folder with config.json in it")
    seen = [
        [name, entry["size"], *[str(entry[mark]) for mark in _MARKS if mark in entry]] for name, entry in found.items()
    ]
    copy = cache_root() / "models" / canonical_hash([location.rstrip("/"), seen])
    copy.parent.mkdir(parents=True, exist_ok=True)
    with _alone(copy.with_suffix(".lock")):
        if copy.exists():
            mark_used(copy)
        else:
            sweep_once(cache_root())
            for left in copy.parent.glob(f".{copy.name}-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with _told(location):
                _fetch(storage, found, copy)
    _check(copy)
    return copy


def _listed(storage: Any, path: str) -> dict[str, dict[str, Any]]:
    """Files of the folder by name, without those below it."""
    root = path.rstrip("/")
    entries = storage.find(root, maxdepth=1, detail=True)
    names = {name.removeprefix(f"{root}/"): entry for name, entry in sorted(entries.items())}
    return {name: entry for name, entry in names.items() if "/" not in name and name.endswith(_WANTED)}


def _fetch(storage: Any, found: dict[str, dict[str, Any]], copy: Path) -> None:
    folder = copy.with_name(f".{copy.name}-{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        for name, entry in found.items():
            storage.get_file(entry["name"], str(folder / name))
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                raise OSError(f"{name} came with {size} of its {entry['size']} bytes")
        checksums = {name: sha256_of(folder / name) for name in found}
        with open(folder / CHECKSUMS, "w", encoding="utf-8") as file:
            json.dump(checksums, file)
            file.flush()
            os.fsync(file.fileno())
        folder.rename(copy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(copy: Path) -> None:
    checksums = json.loads((copy / CHECKSUMS).read_text(encoding="utf-8"))
    for name, expected in checksums.items():
        if not (copy / name).is_file() or sha256_of(copy / name) != expected:
            raise CorruptError(f"the local copy {copy / name} was changed", hint=f"remove the folder {copy}")


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Only one process at a time; the lock falls with its process."""
    with open(lock, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _told(location: str) -> Iterator[None]:
    """Errors of the storage in people's terms."""
    try:
        yield
    except FileNotFoundError:
        raise NotFoundError(f"there is no model at {location}") from None
    except ImportError as error:
        raise InputError(f"{location} cannot be read: {error}", hint="pip install 'rollmill[s3]'") from None
    except Exception as error:  # each storage has errors of its own
        raise InputError(f"{location} cannot be read: {type(error).__name__}: {error}") from error
