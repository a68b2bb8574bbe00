"""Verified local copies of stored files, and folders of them under their logical names.

A file is trusted only after its checksum was computed in this process. On a local store nothing is
copied: folders hold hard links (else symbolic links, else copies).
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from schemas.artifacts import FileEntry, Manifest
from schemas.canonical import canonical_hash
from schemas.errors import CorruptError, NotFoundError
from stages.artifacts.checksums import each, file_checksum
from stages.artifacts.layout import artifact_folder, corrupt, removed_path
from stages.artifacts.storage import Storage
from stages.artifacts.sweep import mark_used, sweep_once

_VERIFIED: dict[str, tuple[str, int, int, int]] = {}
"""By path: checksum, inode, size and time of the last change when it was computed in this process."""


def cache_root() -> Path:
    """Folder of local copies: ``ROLLMILL_CACHE``, else ``~/.cache/rollmill``."""
    return Path(os.environ.get("ROLLMILL_CACHE") or Path.home() / ".cache" / "rollmill").absolute()


def verified_file(storage: Storage, manifest: Manifest, entry: FileEntry) -> Path:
    """A local file with the content that the manifest names.

    Raises:
        CorruptError: the stored file is missing or its checksum differs.
        NotFoundError: it belongs to a part that was removed on purpose.
    """
    path = f"{artifact_folder(manifest.kind, manifest.key)}/{entry.path}"
    local = storage.local_path(path)
    if local is None:
        local = cache_root() / "files" / entry.sha256[:2] / entry.sha256
        if local.exists() and str(local) not in _VERIFIED:
            mark_used(local)  # before its checksum: that is remembered together with its time
        if local.exists() and has_checksum(local, entry.sha256):
            return local
        sweep_once(cache_root())
        _download(storage, manifest, entry, path, local)
        return local
    try:
        if has_checksum(local, entry.sha256):
            return local
    except FileNotFoundError:
        raise missing(storage, manifest, entry) from None
    raise corrupt(storage, path, _difference(local.stat().st_size, entry))


def part_folder(storage: Storage, manifest: Manifest, part: str) -> Path:
    """A local folder with the files of a part under their logical names; to be read only.

    Raises:
        NotFoundError: the artifact has no such part, or it was removed on purpose.
        CorruptError: a stored file is missing or its checksum differs.
    """
    entries = manifest.table_files(part)
    if not entries:
        parts = sorted({entry.table for entry in manifest.files})
        raise NotFoundError(f"{manifest.ref} has no part {part!r}", hint=f"it has: {', '.join(parts) or 'no files'}")
    content = canonical_hash([[entry.name, entry.sha256] for entry in entries])
    folder = cache_root() / "folders" / f"{part}-{content[:24]}"
    mark_used(folder)
    if _is_whole(folder, entries):
        return folder
    sweep_once(cache_root())
    building = folder.with_name(f"{folder.name}.building-{secrets.token_hex(8)}")
    try:
        files = each(storage, lambda entry: verified_file(storage, manifest, entry), entries)
        for entry, file in zip(entries, files, strict=True):
            target = building / entry.name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(file, target)
        _install(building, folder, entries)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def has_checksum(path: Path, sha256: str) -> bool:
    """Whether the file has this checksum; computed once a process while the file stays unchanged."""
    status = path.stat()
    state = (status.st_ino, status.st_size, status.st_mtime_ns)
    known = _VERIFIED.get(str(path))
    if known is None or known[1:] != state:
        known = (file_checksum(path), *state)
        _VERIFIED[str(path)] = known
    return known[0] == sha256


def missing(storage: Storage, manifest: Manifest, entry: FileEntry) -> NotFoundError | CorruptError:
    """The error about a listed file that is not there."""
    if storage.exists(removed_path(manifest.kind, manifest.key, entry.table)):
        return NotFoundError(
            f"the {entry.table} part of {manifest.ref} was removed by garbage collection to save space",
            hint="use a newer policy of the run, or start without it",
        )
    return corrupt(storage, f"{artifact_folder(manifest.kind, manifest.key)}/{entry.path}", "the file is missing")


def _difference(size: int, entry: FileEntry) -> str:
    if size != entry.bytes:
        return f"it has {size} bytes, its manifest says {entry.bytes}"
    return "its checksum differs from its manifest's"


def _download(storage: Storage, manifest: Manifest, entry: FileEntry, path: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    arriving = target.with_name(f".tmp-{secrets.token_hex(16)}")
    try:
        try:
            storage.download(path, arriving)
        except FileNotFoundError:
            raise missing(storage, manifest, entry) from None
        if not has_checksum(arriving, entry.sha256):
            raise corrupt(storage, path, _difference(arriving.stat().st_size, entry))
        arriving.chmod(0o444)
        os.replace(arriving, target)
        status = target.stat()
        _VERIFIED[str(target)] = (entry.sha256, status.st_ino, status.st_size, status.st_mtime_ns)
    finally:
        _VERIFIED.pop(str(arriving), None)
        arriving.unlink(missing_ok=True)


def _is_whole(folder: Path, entries: Sequence[FileEntry]) -> bool:
    try:
        return all(has_checksum(folder / entry.name, entry.sha256) for entry in entries)
    except FileNotFoundError:
        return False


def _install(building: Path, folder: Path, entries: Sequence[FileEntry]) -> None:
    """Gives the finished folder its name; a damaged one there is replaced, a whole one is kept."""
    for _ in range(10):
        with contextlib.suppress(OSError):  # another process was quicker: its folder is looked at
            os.rename(building, folder)
            return
        if _is_whole(folder, entries):
            return
        aside = folder.with_name(f"{folder.name}.building-{secrets.token_hex(8)}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"{folder} cannot be put in place")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        try:
            os.symlink(source, target)
        except OSError:
            shutil.copyfile(source, target)
