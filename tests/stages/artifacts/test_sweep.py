"""Local copies do not pile up, and none that may be in use goes."""

import os
import shutil
import time
from pathlib import Path

import pytest

from schemas.artifacts import Manifest
from stages.artifacts import sweep
from stages.artifacts.store import Store
from tests.builders import given

DAY_S = 24 * 3600.0


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of local copies, swept by nobody yet."""
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sweep, "_SWEPT", set())
    return tmp_path / "cache"


def policy(store: Store, label: str = "a") -> Manifest:
    return given(store, "policy", parts={"checkpoint": {"weights": label.encode() * 100}})


def aged(path: Path, days: float) -> Path:
    os.utime(path, (time.time() - days * DAY_S,) * 2)
    return path


def test_copies_that_nobody_asked_for_go_after_a_month(memory_store: Store, copies: Path) -> None:
    old, recent = (aged(memory_store.folder(policy(memory_store, label), "checkpoint"), days) for label, days in
                   (("a", 31), ("b", 29)))  # fmt: skip
    for file in (copies / "files").rglob("*"):
        if file.is_file():
            aged(file, 31)
    sweep._SWEPT.clear()
    sweep.sweep_once(copies)
    assert not old.exists()
    assert recent.exists()
    assert not [file for file in (copies / "files").rglob("*") if file.is_file()]
    assert memory_store.folder(policy(memory_store, "a"), "checkpoint").exists(), "it is fetched again"


def test_asking_for_a_copy_keeps_it(store: Store, copies: Path) -> None:
    manifest = policy(store)
    aged(store.folder(manifest, "checkpoint"), 31)
    folder = store.folder(manifest, "checkpoint")
    sweep._SWEPT.clear()
    sweep.sweep_once(copies)
    assert folder.exists()


def test_the_last_links_to_a_deleted_store_go_after_a_day(store: Store, copies: Path) -> None:
    folder = aged(store.folder(policy(store), "checkpoint"), 2)
    sweep.sweep_once(copies)
    assert folder.exists(), "the store still has it"
    shutil.rmtree(store.url)
    sweep._SWEPT.clear()
    sweep.sweep_once(copies)
    assert not folder.exists()


def test_folders_that_were_never_finished_go_after_a_day(copies: Path) -> None:
    old, fresh = copies / "folders" / "x.building-1", copies / "folders" / "x.building-2"
    for folder in (old, fresh):
        folder.mkdir(parents=True)
    aged(old, 2)
    sweep.sweep_once(copies)
    assert (old.exists(), fresh.exists()) == (False, True)


def test_a_process_sweeps_once(store: Store, copies: Path) -> None:
    store.folder(policy(store), "checkpoint")
    stale = copies / "folders" / "x.building-1"
    stale.mkdir()
    aged(stale, 2)
    store.folder(policy(store, "b"), "checkpoint")
    assert stale.exists()
