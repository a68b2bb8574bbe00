"""Keeps the folder of local copies from growing for ever; runs once a process, when something is added to it.

Everything in it can be made again from where it came, so age is all that counts.
"""

import os
import shutil
import time
from pathlib import Path

UNUSED_S = 30 * 24 * 3600.0
"""What nobody has asked for within this time goes."""
ORPHAN_S = 24 * 3600.0
"""So does, after this time, what only this folder still holds: its store is gone or has collected it; and a journal of
calls whose work nobody has gone on with."""

_SWEPT: set[Path] = set()


def sweep_once(cache: Path) -> None:
    """Removes old copies, once a process and cache."""
    if cache in _SWEPT:
        return
    _SWEPT.add(cache)
    now = time.time()
    for folder in _children(cache / "folders"):
        limit = ORPHAN_S if ".building-" in folder.name or _is_orphan(folder) else UNUSED_S
        if _age(folder, now) > limit:
            shutil.rmtree(folder, ignore_errors=True)
    for model in _children(cache / "models"):
        if model.is_dir() and _age(model, now) > UNUSED_S:
            shutil.rmtree(model, ignore_errors=True)
    for journal in _children(cache / "journal"):
        if _age(journal, now) > ORPHAN_S:
            shutil.rmtree(journal, ignore_errors=True)
    for shelf in _children(cache / "files"):
        for file in _children(shelf):
            if _age(file, now) > UNUSED_S:
                file.unlink(missing_ok=True)


def mark_used(path: Path) -> None:
    """Notes that a copy was asked for now."""
    try:
        os.utime(path)
    except OSError:
        return  # another user's, or gone: it is used all the same


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_orphan(folder: Path) -> bool:
    """Whether each file is the last link to its content, or a link to nothing."""
    files = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return all(not path.exists() or (not path.is_symlink() and path.stat().st_nlink == 1) for path in files)
