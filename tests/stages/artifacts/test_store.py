"""Opening a store, and finding an artifact by what a person calls it."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError, CorruptError, KindError, NotFoundError, StoreError
from stages.artifacts import store as store_module
from stages.artifacts.layout import manifest_path
from stages.artifacts.storage_local import LocalStorage
from stages.artifacts.store import Store, digest_of, open_store
from tests.builders import given, stored_policy, stored_rollouts, stored_run, stored_tasks, task_rows


class Overwriting(LocalStorage):
    """A storage as some S3-compatible servers are: answers "created" and overwrites."""

    def put_if_absent(self, path: str, data: bytes | Path) -> bool:
        self.delete(path)
        return super().put_if_absent(path, data)


def test_a_storage_that_overwrites_is_refused_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "open_storage", lambda url, **_: Overwriting(url))
    with pytest.raises(StoreError, match="overwrites"):
        open_store(tmp_path / "store")
    assert not (tmp_path / "store").exists()
    assert open_store(tmp_path / "store", single_writer=True).writable


def test_opening_a_store_leaves_nothing_behind(tmp_path: Path) -> None:
    open_store(tmp_path / "new" / "store")
    assert not (tmp_path / "new" / "store").exists()


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be written") as caught:
        open_store(tmp_path / "file" / "store")
    assert str(tmp_path / "file") in str(caught.value)
    with pytest.raises(StoreError, match="cannot be written"):
        open_store("/proc/rollmill")


def test_a_bucket_that_does_not_exist_is_named(s3_client: Any) -> None:
    with pytest.raises(StoreError, match="s3://no-such-bucket-here/x"):
        open_store("s3://no-such-bucket-here/x")
    with pytest.raises(NotFoundError, match="no store at s3://no-such-bucket-here/x"):
        open_store("s3://no-such-bucket-here/x", writable=False)


def test_opening_for_reading_writes_nothing_and_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no store at"):
        open_store(tmp_path / "nothing", writable=False)
    assert not (tmp_path / "nothing").exists()
    stored_tasks(open_store(tmp_path / "store"))
    before = sorted(tmp_path.rglob("*"))
    for folder in [tmp_path / "store", *(path for path in before if path.is_dir())]:
        folder.chmod(0o555)
    reading = open_store(tmp_path / "store", writable=False)
    assert reading.storage.names("artifacts") == ["tasks"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_survives_pickling(any_store: Store) -> None:
    manifest = stored_tasks(any_store)
    assert pickle.loads(pickle.dumps(any_store)).manifest(manifest.ref) == manifest


def test_an_artifact_is_found_by_every_form_of_its_name(any_store: Store) -> None:
    stored_run(any_store, "demo", iterations=2)
    first, last = (record.artifacts["policy"] for record in any_store.iterations("demo"))
    for text, ref in [
        ("demo:policy", last),
        ("demo@0:policy", first),
        ("demo@1:policy_in", first),
        (f"policy/{last.key}", last),
        (f"policy/{last.key[:10]}", last),
        (f"policy/{last.key[:10].upper()}", last),
        (f"artifacts/policy/{last.key}", last),
        (f"{any_store.url}/artifacts/policy/{last.key}", last),
        (f"{any_store.url}/artifacts/policy/{last.key}/manifest.json", last),
    ]:
        assert any_store.resolve(text, "policy").ref == ref, text
    assert any_store.manifest(last) == any_store.manifest(str(last))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("polcy/12", r"did you mean 'policy'"),
        ("nonsense", r"not a reference.*KIND/KEY"),
        ("demo:polixy", r"did you mean 'policy'"),
        ("dmo:policy", r"no run 'dmo'.*did you mean 'demo'"),
        ("demo@7:policy", r"no finished iteration 7.*it has 0, 1"),
        ("demo:report", r"no 'report'"),
        ("/elsewhere/artifacts/policy/12", r"another store"),
    ],
)
def test_a_name_that_finds_nothing_suggests_what_there_is(store: Store, text: str, said: str) -> None:
    stored_run(store, "demo", iterations=2)
    with pytest.raises(NotFoundError, match=f"(?s){said}"):
        store.resolve(text)


def test_a_key_of_another_kind_is_recognised(store: Store) -> None:
    tasks = stored_tasks(store)
    stored_policy(store)
    with pytest.raises(NotFoundError, match=f"did you mean tasks/{tasks.key[:12]}"):
        store.resolve(f"rollouts/{tasks.key[:12]}")
    nearly = tasks.key[:5] + ("0" if tasks.key[5] != "0" else "1") + tasks.key[6:12]
    with pytest.raises(NotFoundError, match=f"did you mean tasks/{tasks.key[:12]}"):
        store.resolve(f"tasks/{nearly}")


def test_an_artifact_of_the_wrong_kind_is_refused(store: Store) -> None:
    tasks = stored_tasks(store)
    with pytest.raises(KindError, match="kind tasks, but rollouts is needed"):
        store.resolve(str(tasks.ref), "rollouts")


def test_an_ambiguous_key_names_the_candidates(store: Store) -> None:
    made = [given(store, "tasks", {"tasks": task_rows(1, answer=str(number))}) for number in range(40)]
    digit = next(d for d in "0123456789abcdef" if sum(m.key.startswith(d) for m in made) > 1)
    candidates = [manifest for manifest in made if manifest.key.startswith(digit)]
    with pytest.raises(NotFoundError, match=f"could be {len(candidates)} artifacts") as caught:
        store.resolve(f"tasks/{digit}")
    assert all(manifest.key[:16] in str(caught.value) for manifest in candidates[:8])


def test_unfinished_work_is_told_from_none(store: Store) -> None:
    manifest = stored_tasks(store)
    store.storage.delete(manifest_path("tasks", manifest.key))
    with pytest.raises(NotFoundError, match="begun and is not finished"):
        store.resolve(str(manifest.ref))


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: raw.replace(b'"kind"', b'"kinb"'),
        lambda raw: b"[]",
        lambda raw: b"\xff\xfe" + raw,
        lambda raw: raw.replace(b'"digest":"', b'"digest":"0', 1),
        lambda raw: raw.replace(b'"format_version":1', b'"format_version":"x"'),
    ],
)
def test_a_damaged_manifest_is_named_with_what_to_do(any_store: Store, damage: Any) -> None:
    manifest = stored_tasks(any_store)
    path = manifest_path("tasks", manifest.key)
    raw = any_store.storage.read(path)
    any_store.storage.delete(path)
    any_store.storage.put_if_absent(path, damage(raw))
    for read in (lambda: any_store.manifest(manifest.ref), lambda: any_store.resolve(str(manifest.ref))):
        with pytest.raises(CorruptError, match=r"manifest\.json is damaged") as caught:
            read()
        assert f"{any_store.url}/{path}" in str(caught.value)
        assert "restore this file" in str(caught.value)
        assert "\n" not in caught.value.message


def test_a_manifest_of_a_newer_rollmill_is_not_called_damaged(store: Store) -> None:
    manifest = stored_tasks(store)
    path = manifest_path("tasks", manifest.key)
    values = json.loads(store.storage.read(path)) | {"format_version": 2, "new": 1}
    store.storage.delete(path)
    store.storage.put_if_absent(path, json.dumps(values).encode())
    with pytest.raises(StoreError, match="newer Rollmill"):
        store.manifest(manifest.ref)


def test_a_manifest_under_another_name_is_refused(store: Store) -> None:
    manifest = stored_tasks(store)
    other = "0" * 64
    store.storage.put_if_absent(manifest_path("tasks", other), store.storage.read(manifest_path("tasks", manifest.key)))
    with pytest.raises(CorruptError, match="does not fit"):
        store.find("tasks", other)


def test_a_reference_to_an_older_result_is_refused(store: Store) -> None:
    manifest = stored_tasks(store)
    with pytest.raises(CorruptError, match="made again with another result"):
        store.manifest(manifest.ref.model_copy(update={"digest": "0" * 64}))


def test_a_digest_depends_on_content_and_not_on_where_or_when(store: Store, memory_store: Store) -> None:
    here, there = (stored_rollouts(shelf, stored_tasks(shelf), stored_policy(shelf)) for shelf in (store, memory_store))
    assert here.digest == there.digest
    assert here.nonce != there.nonce
    assert digest_of(here.model_copy(update={"files": here.files[::-1]})) == here.digest
    assert digest_of(here.model_copy(update={"files": here.files[1:]})) != here.digest


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a=b", ".hidden", "a b", "x" * 200, "a..b", "é"])
def test_no_run_artifact_or_table_name_can_leave_the_store(store: Store, name: str) -> None:
    for use in (
        lambda: store.run(name),
        lambda: store.find(name, "0" * 64),
        lambda: store.find("tasks", name),
        lambda: given(store, "policy", parts={"checkpoint": {f"folder/{name}/": b"x"}}),
        lambda: given(store, "policy", parts={name: {"x": b"x"}}),
    ):
        with pytest.raises(ConfigError, match="cannot be used"):
            use()
    assert not list(Path(store.url).parent.glob("x*"))


def test_a_moved_store_is_whole(store: Store, tmp_path: Path) -> None:
    """No absolute path is stored."""
    stored_run(store)
    shutil.move(store.url, tmp_path / "moved")
    moved = open_store(tmp_path / "moved", writable=False)
    manifest = moved.resolve("demo:rollouts")
    assert moved.inputs({"it": [manifest]}).scan("it", "steps").collect().height == 6
