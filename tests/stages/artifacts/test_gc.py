"""Garbage collection never takes what a manifest names nor what is in work, and only shows unless told."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import CorruptError, NotFoundError, StoreError
from stages.artifacts.commit import finish, materialise, prepare, run_shard
from stages.artifacts.gc import collect_garbage
from stages.artifacts.layout import artifact_folder, manifest_path
from stages.artifacts.storage import Entry
from stages.artifacts.storage_local import LocalStorage
from stages.artifacts.store import Store, open_store
from stages.artifacts.verify import verify
from tests.builders import numbers_request, stored_policy, stored_run, stored_tasks
from tests.stages.artifacts.faults import Crash, faulty

WEEK_S = 7 * 24 * 3600.0


def age(store: Store, seconds: float, below: str = "") -> None:
    """Makes every file of a local store look as if it had been written so long ago."""
    for entry in store.storage.entries(below):
        os.utime(Path(store.url) / entry.path, (time.time() - seconds, entry.modified - seconds))


def paths(store: Store) -> set[str]:
    return {entry.path for entry in store.storage.entries("")}


def test_a_store_of_finished_work_holds_no_garbage(any_store: Store) -> None:
    stored_run(any_store)
    assert collect_garbage(any_store, grace_s=0) == []


def test_files_that_no_manifest_names_go_and_the_rest_stays(any_store: Store) -> None:
    manifest = materialise(any_store, numbers_request()).manifest
    before = paths(any_store)
    folder = artifact_folder("tasks", manifest.key)
    strays = {f"{folder}/data/tasks/00000-0123456789ab.parquet", f"{folder}/data/.tmp-1", "runs/r/.tmp-2", ".tmp-3"}
    for path in strays:
        any_store.storage.put_if_absent(path, b"left over")
    shown = collect_garbage(any_store, grace_s=0)
    assert {item.path for item in shown} == strays
    assert {item.bytes for item in shown} == {9}
    assert paths(any_store) == before | strays, "showing deletes nothing"
    assert {item.path for item in collect_garbage(any_store, grace_s=0, delete=True)} == strays
    assert paths(any_store) == before
    verify(any_store, manifest)


def test_nothing_goes_within_the_grace_period(any_store: Store) -> None:
    any_store.storage.put_if_absent(".tmp-1", b"")
    prepare(any_store, numbers_request())
    assert collect_garbage(any_store, delete=True) == []
    assert len(paths(any_store)) == 2


def test_a_scratch_folder_goes_only_when_nothing_in_it_is_fresh(store: Store) -> None:
    """A shard that takes weeks still has what it made on its first day."""
    for path in (".tmp-work-1/old", ".tmp-work-1/deep/fresh", ".tmp-work-2/old"):
        store.storage.put_if_absent(path, b"1")
    age(store, WEEK_S + 60, ".tmp-work-2")
    os.utime(Path(store.url) / ".tmp-work-1/old", (0, 0))
    assert [item.path for item in collect_garbage(store, delete=True)] == [".tmp-work-2/old"]
    assert store.storage.names("") == [".tmp-work-1"]


def test_work_that_was_begun_and_left_goes_as_a_whole(store: Store) -> None:
    request = numbers_request()
    plan = prepare(store, request)
    run_shard(store, request, plan, "00000")
    age(store, WEEK_S + 60)
    shown = collect_garbage(store)
    assert {item.path for item in shown} == paths(store)
    assert {item.reason for item in shown} == {"begun and never finished"}
    assert min(item.age_s for item in shown) > WEEK_S
    collect_garbage(store, delete=True)
    assert paths(store) == set()
    materialise(store, request)


def test_work_of_which_anything_is_fresh_stays_whole(store: Store) -> None:
    """A long piece of work: its plan and first shards are older than the grace period."""
    request = numbers_request()
    plan = prepare(store, request)
    run_shard(store, request, plan, "00000")
    age(store, WEEK_S + 60)
    run_shard(store, request, plan, "00001")
    before = paths(store)
    assert collect_garbage(store, delete=True) == []
    assert paths(store) == before
    run_shard(store, request, plan, "00002")
    verify(store, finish(store, request, plan))


def test_old_work_that_is_taken_up_again_is_safe_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receipts are as old as the plan; adopting them must not race with the collector."""
    request = numbers_request()
    plan = prepare(store, request)
    for shard in plan.shards:
        run_shard(store, request, plan, shard.id)
    age(store, WEEK_S + 60)
    monkeypatch.setattr("stages.artifacts.commit.LEASE_AFTER_S", 0.0)
    prepare(store, request)
    assert collect_garbage(store, delete=True) == []
    manifest = finish(store, request, plan)
    verify(store, manifest)
    age(store, WEEK_S + 60)
    collect_garbage(store, delete=True)
    assert not [path for path in paths(store) if "lease" in path]
    verify(store, manifest)


def test_work_taken_up_between_looking_and_deleting_is_left_alone(store: Store) -> None:
    request = numbers_request()
    prepare(store, request)
    age(store, WEEK_S + 60)
    looks: list[int] = []

    class Racing(LocalStorage):
        def entries(self, folder: str) -> Iterator[Entry]:
            looks.append(1)
            if len(looks) == 2:
                materialise(store, request)
            return super().entries(folder)

    racing = Store(Racing(store.url), writable=True)
    assert collect_garbage(racing, delete=True) == []
    assert len(looks) == 2
    verify(store, materialise(store, request).manifest)


def test_a_damaged_manifest_stops_the_collector_before_it_deletes(store: Store) -> None:
    manifest = stored_tasks(store)
    store.storage.put_if_absent(".tmp-1", b"")
    path = manifest_path("tasks", manifest.key)
    store.storage.delete(path)
    store.storage.put_if_absent(path, b"{")
    before = paths(store)
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        collect_garbage(store, grace_s=0, delete=True)
    assert paths(store) == before


def test_a_store_opened_for_reading_is_only_looked_at(store: Store) -> None:
    stored_tasks(store)
    store.storage.put_if_absent(".tmp-1", b"")
    reading = open_store(store.url, writable=False)
    assert len(collect_garbage(reading, grace_s=0)) == 1
    with pytest.raises(StoreError, match="for reading"):
        collect_garbage(reading, grace_s=0, delete=True)


def test_optimizer_states_that_training_has_passed_go_on_request(any_store: Store) -> None:
    stored_run(any_store, "demo", iterations=3)
    alone = stored_policy(any_store, "alone")
    assert collect_garbage(any_store, grace_s=0) == []
    policies = [record.artifacts["policy"] for record in any_store.iterations("demo")]
    first = any_store.iterations("demo")[0].artifacts["policy_in"]
    gone = {ref.key for ref in (first, *policies[:2])}
    removed = collect_garbage(any_store, grace_s=0, delete=True, optimizers=True)
    assert {item.path.split("/")[2] for item in removed} == gone
    assert all("/data/optimizer/" in item.path for item in removed)
    for ref in (policies[2], alone.ref):
        assert any_store.folder(any_store.manifest(ref), "optimizer").is_dir()
    passed = any_store.manifest(policies[0])
    assert any_store.folder(passed, "checkpoint").is_dir()
    verify(any_store, passed)
    assert any_store.inputs({"it": [passed]}).scan("it", "probe").collect().height == 1
    assert collect_garbage(any_store, grace_s=0, delete=True, optimizers=True) == []


def test_the_last_policy_of_a_run_keeps_its_optimizer_though_another_run_went_on_from_it(store: Store) -> None:
    stored_run(store, "demo", iterations=1)
    last = store.resolve("demo:policy")
    stored_policy(store, "fork", {"policy": [last]})
    gone = collect_garbage(store, grace_s=0, optimizers=True)
    assert {item.path.split("/")[2] for item in gone} == {store.resolve("demo:policy_in").key}


def test_a_removed_part_says_so_only_when_it_is_asked_for(any_store: Store, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    stored_run(any_store, "demo", iterations=2)
    collect_garbage(any_store, grace_s=0, delete=True, optimizers=True)
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "fresh"))
    with pytest.raises(NotFoundError, match=r"optimizer part of policy/.* was removed by garbage collection"):
        any_store.folder(any_store.resolve("demo@0:policy"), "optimizer")


def test_a_collection_that_crashes_at_any_deletion_can_be_repeated(memory_store: Store) -> None:
    stored_run(memory_store, "demo", iterations=2)
    memory_store.storage.put_if_absent(".tmp-1", b"")
    n_changes, at = None, 0
    while n_changes is None:
        at += 1
        crashing, storage = faulty(memory_store, at=at)
        try:
            collect_garbage(crashing, grace_s=0, delete=True, optimizers=True)
            n_changes = storage.n_changes
        except Crash:
            for record in memory_store.iterations("demo"):
                for ref in record.artifacts.values():
                    verify(memory_store, ref)
    assert at > 2
