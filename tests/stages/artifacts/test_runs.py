"""Records of runs: created once, continued by the same config only."""

from typing import Any

import pytest

from schemas.artifacts import IterationRecord, RunEnd, RunRecord
from schemas.errors import ConfigError, CorruptError, NotFoundError, StoreError
from stages.artifacts.code import code_version
from stages.artifacts.layout import new_nonce
from stages.artifacts.store import Store, open_store
from tests.builders import NOON, stored_run, stored_tasks


def run_record(config: dict[str, Any] | None = None, **changes: Any) -> RunRecord:
    values = {
        "run": "r",
        "flow": "train",
        "config": config if config is not None else {"policy": {"lr": 1e-3, "betas": [0.9, 0.99]}, "seed": 1},
        "created_at": NOON,
        "code": code_version(),
        "nonce": new_nonce(),
    }
    return RunRecord(**(values | changes))


def test_a_run_is_recorded_once_and_continued_by_the_same_config(any_store: Store) -> None:
    first = any_store.put_run(run_record())
    assert any_store.put_run(run_record()) == first
    assert any_store.run("r") == first
    assert any_store.runs() == ["r"]


def test_another_config_is_refused_with_each_difference(store: Store) -> None:
    store.put_run(run_record())
    with pytest.raises(ConfigError) as caught:
        store.put_run(run_record({"policy": {"lr": 2e-3, "betas": [0.9, 0.99]}, "n": None}, flow="evaluate"))
    assert "the run 'r' exists with another config" in str(caught.value)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    assert lines == [
        'flow: "train" in the store, "evaluate" asked for',
        "n: (absent) in the store, null asked for",
        "policy.lr: 0.001 in the store, 0.002 asked for",
        "seed: 1 in the store, (absent) asked for",
    ]


def test_iterations_come_in_order_and_are_recorded_once(any_store: Store) -> None:
    tasks = stored_tasks(any_store)
    any_store.put_run(run_record())
    assert any_store.iterations("r") == []
    for iteration in (10, 2, 1):
        record = IterationRecord(
            run="r", iteration=iteration, artifacts={"tasks": tasks.ref}, finished_at=NOON, nonce=new_nonce()
        )
        assert any_store.put_iteration(record) == record
    assert [record.iteration for record in any_store.iterations("r")] == [1, 2, 10]
    again = record.model_copy(update={"nonce": new_nonce()})
    assert any_store.put_iteration(again) == record
    other = record.model_copy(update={"artifacts": {"tasks": tasks.ref.model_copy(update={"digest": "0" * 64})}})
    with pytest.raises(StoreError, match=r"iteration 1 of the run 'r'.*tasks differ"):
        any_store.put_iteration(other)


def test_a_run_ends_once(any_store: Store) -> None:
    any_store.put_run(run_record())
    assert any_store.run_end("r") is None
    end = any_store.put_run_end(RunEnd(run="r", iterations=2, report=None, finished_at=NOON, nonce=new_nonce()))
    assert any_store.run_end("r") == end
    assert any_store.put_run_end(end.model_copy(update={"nonce": "later"})) == end


def test_an_unknown_run_names_the_nearest(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no runs yet"):
        store.run("demo")
    stored_run(store, "demo")
    for read in (store.run, store.iterations, store.run_end):
        with pytest.raises(NotFoundError, match="did you mean 'demo'"):
            read("demp")


def test_a_stray_file_is_no_run_and_no_iteration(store: Store) -> None:
    stored_run(store, "demo", iterations=1)
    store.storage.put_if_absent("runs/junk/readme.txt", b"x")
    store.storage.put_if_absent("runs/demo/iterations/.tmp-0123", b"half")
    store.storage.put_if_absent("runs/demo/iterations/notes.json", b"{}")
    assert store.runs() == ["demo"]
    assert len(store.iterations("demo")) == 1


def test_a_damaged_run_is_named(store: Store) -> None:
    store.storage.put_if_absent("runs/r/run.json", b'{"run": "r"')
    with pytest.raises(CorruptError, match=r"runs/r/run\.json is damaged"):
        store.run("r")


def test_nothing_is_recorded_through_a_store_opened_for_reading(store: Store) -> None:
    stored_run(store, "demo", iterations=1)
    reading = open_store(store.url, writable=False)
    for put in (
        lambda: reading.put_run(run_record()),
        lambda: reading.put_iteration(store.iterations("demo")[0]),
        lambda: reading.put_run_end(RunEnd(run="demo", iterations=1, report=None, finished_at=NOON, nonce="n")),
    ):
        with pytest.raises(StoreError, match="for reading"):
            put()
    assert len(reading.iterations("demo")) == 1
