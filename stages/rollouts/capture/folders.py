"""Where a gateway's sessions lie until they are committed: a folder for each gateway, which is its own while it runs.

``sessions`` holds those that are not committed. To be committed together they are moved into a folder below
``batches``, whose content does not change any more, so that a commit that is killed is finished and never made twice.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from schemas.artifacts import Record, Ref
from stages.rollouts.capture.config import GatewayConfig
from stages.rollouts.capture.episodes import SUFFIX


class RunFile(Record):
    """What a gateway's sessions have in common."""

    store: str
    policy: Ref
    gateway: GatewayConfig
    seed: int
    logprob_mode: str


class RunFolder:
    """The folder of one gateway, held with a lock until ``release`` or until the process is gone."""

    def __init__(self, path: Path, run: RunFile, lock: int):
        self.path = path
        self.run = run
        self._lock = lock

    @property
    def sessions(self) -> Path:
        return self.path / "sessions"

    def session_path(self, episode_id: str) -> Path:
        return self.sessions / f"{episode_id}{SUFFIX}"

    def batches(self) -> list[Path]:
        """Those that were begun and are not known to be committed."""
        return sorted((self.path / "batches").glob("*"))

    def new_batch(self, paths: Iterable[Path]) -> Path | None:
        """Moves sessions into a batch; None: there are none."""
        paths = list(paths)
        if not paths:
            return None
        batch = self.path / "batches" / f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(4)}"
        batch.mkdir(parents=True)
        for path in paths:
            path.rename(batch / path.name)
        return batch

    def left(self) -> list[Path]:
        """Sessions that are in no batch."""
        return sorted(self.sessions.glob(f"*{SUFFIX}"))

    def release(self) -> None:
        """Ends the hold, and removes the folder where nothing is left in it."""
        if not self.left() and not self.batches():
            shutil.rmtree(self.path)
        os.close(self._lock)

    def abandon(self) -> None:
        """Ends the hold, whatever is left."""
        os.close(self._lock)


def begin(folder: Path, run: RunFile) -> RunFolder:
    """A new gateway's folder."""
    path = folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
    path.mkdir(parents=True, mode=0o700)
    lock = _locked(path)
    assert lock is not None
    (path / "sessions").mkdir()
    temporary = path / "run.json.tmp"
    temporary.write_text(run.model_dump_json(), encoding="utf-8")
    temporary.rename(path / "run.json")
    return RunFolder(path, run, lock)


def left_behind(folder: Path) -> Iterator[RunFolder]:
    """The folders of gateways that are gone, each held."""
    for path in sorted(folder.glob("*/run.json")):
        lock = _locked(path.parent)
        if lock is None:
            continue
        try:
            run = RunFile.model_validate_json(path.read_bytes())
        except (ValidationError, FileNotFoundError):
            os.close(lock)  # of another version, which knows what to do with it, or it has just been removed
            continue
        yield RunFolder(path.parent, run, lock)


def _locked(path: Path) -> int | None:
    """None: its gateway runs."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
