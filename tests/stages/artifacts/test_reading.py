"""Reading what is stored: inputs verified by checksum, folders of parts, and lazy frames."""

import shutil
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from schemas.artifacts import Manifest
from schemas.errors import CorruptError, NotFoundError, StoreError
from schemas.tables import TABLES
from stages.artifacts import cache
from stages.artifacts.layout import artifact_folder
from stages.artifacts.scan import scan
from stages.artifacts.store import Store, open_store
from stages.artifacts.verify import verify
from tests.builders import given, stored_policy, stored_rewards, stored_rollouts, stored_run, stored_tasks, task_rows


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def rollouts(any_store: Store) -> Manifest:
    return stored_rollouts(any_store, stored_tasks(any_store), stored_policy(any_store))


def damage(store: Store, manifest: Manifest, table: str, change: Any) -> str:
    """Changes the first file of a table behind the store's back; returns its path."""
    path = f"{artifact_folder(manifest.kind, manifest.key)}/{manifest.table_files(table)[0].path}"
    raw = bytearray(store.storage.read(path))
    store.storage.delete(path)
    changed = change(raw)
    if changed is not None:
        store.storage.put_if_absent(path, bytes(changed))
    return path


def flip(raw: bytearray) -> bytearray:
    raw[len(raw) // 2] ^= 1
    return raw


DAMAGES = [
    (flip, "checksum differs"),
    (lambda raw: raw[:-10], "bytes, its manifest says"),
    (lambda raw: None, "the file is missing"),
]


@pytest.mark.usefixtures("empty_cache")
def test_inputs_give_the_rows_of_all_files_in_the_declared_schema(any_store: Store, rollouts: Manifest) -> None:
    inputs = any_store.inputs({"rollouts": [rollouts]})
    steps = inputs.scan("rollouts", "steps").collect()
    assert steps["episode_id"].to_list() == ["t000-0", "t000-1", "t001-0", "t001-1", "t002-0", "t002-1"]
    assert steps["logprobs"].to_list() == [[-0.5] * 3] * 6
    declared = pl.from_arrow(TABLES["steps"].schema.empty_table())
    assert isinstance(declared, pl.DataFrame)
    assert steps.schema == declared.schema
    assert inputs.manifest("rollouts") == rollouts


def test_inputs_follow_the_files_of_chosen_shards(store: Store) -> None:
    rollouts = stored_rollouts(store, stored_tasks(store), stored_policy(store))
    inputs = store.inputs({"rollouts": [rollouts]})
    chosen = inputs.scan("rollouts", "episodes", shards=["00002", "00000"]).collect()
    assert chosen["task_id"].to_list() == ["t000", "t000", "t002", "t002"]
    assert inputs.scan("rollouts", "episodes", shards=[]).collect().height == 0


def test_several_artifacts_of_one_input_are_read_as_one(store: Store) -> None:
    tasks, more = stored_tasks(store), given(store, "tasks", {"tasks": [r | {"task_id": "z"} for r in task_rows(1)]})
    inputs = store.inputs({"tasks": [tasks, more]})
    assert inputs.scan("tasks", "tasks").collect()["task_id"].to_list() == ["t000", "t001", "t002", "z"]
    assert inputs.scan("tasks", "tasks", artifact=more).collect()["task_id"].to_list() == ["z"]
    assert inputs.manifests("tasks") == [tasks, more]
    assert inputs.manifests("absent") == []


def test_a_table_without_rows_has_its_columns(store: Store) -> None:
    tasks = stored_tasks(store)
    rewards = stored_rewards(store, tasks, stored_rollouts(store, tasks, stored_policy(store)))
    frame = store.inputs({"rewards": [rewards]}).scan("rewards", "signals").collect()
    assert (frame.height, frame.columns) == (0, ["episode_id", "trajectory", "name", "value"])
    assert rewards.table_files("signals") == []


def test_a_table_that_the_artifact_lacks_is_refused_by_name(store: Store) -> None:
    tasks = stored_tasks(store)
    with pytest.raises(NotFoundError, match="has no table 'steps'"):
        store.inputs({"tasks": [tasks]}).scan("tasks", "steps")
    newer = tasks.model_copy(update={"schema_versions": {"tasks": 2}})
    with pytest.raises(StoreError, match="written in version 2, this Rollmill reads 1"):
        store.inputs({"tasks": [newer]}).scan("tasks", "tasks")


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(("change", "said"), DAMAGES)
def test_a_damaged_file_is_never_read(any_store: Store, rollouts: Manifest, change: Any, said: str) -> None:
    path = damage(any_store, rollouts, "steps", change)
    with pytest.raises(CorruptError, match=said) as caught:
        any_store.inputs({"it": [rollouts]}).scan("it", "steps")
    assert f"{any_store.url}/{path}" in str(caught.value)
    assert "run the command that made it again" in str(caught.value)
    any_store.inputs({"it": [rollouts]}).scan("it", "episodes").collect()


def test_a_file_damaged_after_it_was_verified_is_noticed(store: Store) -> None:
    tasks = stored_tasks(store)
    store.inputs({"it": [tasks]}).scan("it", "tasks")
    damage(store, tasks, "tasks", flip)
    with pytest.raises(CorruptError):
        store.inputs({"it": [tasks]}).scan("it", "tasks")


def test_a_verified_file_is_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = stored_tasks(store)
    store.inputs({"it": [tasks]}).scan("it", "tasks")
    monkeypatch.setattr(cache, "file_checksum", lambda path: pytest.fail("read again"))
    store.inputs({"it": [tasks]}).scan("it", "tasks")


@pytest.mark.parametrize(("change", "said"), [(flip, "another checksum"), (lambda raw: raw[:-1], "bytes instead"),
                                              (lambda raw: None, "is missing")])  # fmt: skip
def test_verifying_names_every_damaged_file(any_store: Store, rollouts: Manifest, change: Any, said: str) -> None:
    assert verify(any_store, rollouts) == sum(entry.bytes for entry in rollouts.files)
    paths = [damage(any_store, rollouts, table, change) for table in ("steps", "episodes")]
    with pytest.raises(CorruptError, match="2 of 6 files") as caught:
        verify(any_store, str(rollouts.ref))
    assert str(caught.value).count(said) == 2
    assert all(path.partition("/data/")[2] in str(caught.value) for path in paths)


PARTS = {"checkpoint": {"config.json": b"{}", "model.safetensors": b"w" * 1000, "tokenizer/vocab.txt": b"a"}}


def test_a_part_becomes_a_folder_under_its_logical_names(any_store: Store, empty_cache: Path) -> None:
    policy = given(any_store, "policy", parts=PARTS)
    folder = any_store.folder(policy, "checkpoint")
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == PARTS["checkpoint"]
    assert any_store.folder(policy, "checkpoint") == folder
    assert any_store.inputs({"policy": [policy]}).folder("policy", "checkpoint") == folder
    assert empty_cache in folder.parents
    assert [path.name for path in (empty_cache / "folders").iterdir()] == [folder.name], "nothing half-built is left"


def test_a_folder_of_a_local_store_holds_links_and_no_copies(store: Store, empty_cache: Path) -> None:
    policy = given(store, "policy", parts=PARTS)
    assert (store.folder(policy, "checkpoint") / "model.safetensors").stat().st_nlink == 2


def test_where_hard_links_fail_symbolic_links_serve(
    store: Store, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = given(store, "policy", parts=PARTS)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr("os.link", refuse)
        folder = store.folder(policy, "checkpoint")
        assert (folder / "config.json").is_symlink()
        assert (folder / "config.json").read_bytes() == b"{}"
        shutil.rmtree(folder)
        patch.setattr("os.symlink", refuse)
        assert not (store.folder(policy, "checkpoint") / "config.json").is_symlink()
        assert (folder / "config.json").read_bytes() == b"{}"


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(("change", "said"), DAMAGES)
def test_no_folder_is_built_from_a_damaged_part(any_store: Store, change: Any, said: str, empty_cache: Path) -> None:
    policy = given(any_store, "policy", parts=PARTS)
    damage(any_store, policy, "checkpoint", change)
    with pytest.raises(CorruptError, match=said):
        any_store.folder(policy, "checkpoint")
    assert list(empty_cache.glob("folders/*")) == []


@pytest.mark.parametrize("kind", ["memory_store", "s3_store"])
def test_a_damaged_local_copy_is_fetched_again(kind: str, request: pytest.FixtureRequest, empty_cache: Path) -> None:
    store: Store = request.getfixturevalue(kind)
    policy = given(store, "policy", parts=PARTS)
    copy = store.folder(policy, "checkpoint") / "model.safetensors"
    copy.chmod(0o644)
    copy.write_bytes(b"v" * 1000)
    assert (store.folder(policy, "checkpoint") / "model.safetensors").read_bytes() == b"w" * 1000


@pytest.mark.usefixtures("empty_cache")
def test_many_may_ask_for_a_folder_at_once(any_store: Store) -> None:
    policy = given(any_store, "policy", parts=PARTS)
    start, folders = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        folders.append(any_store.folder(policy, "checkpoint"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 8
    assert len(set(folders)) == 1
    assert sorted(path.name for path in folders[0].iterdir()) == ["config.json", "model.safetensors", "tokenizer"]


def test_a_whole_folder_is_never_replaced_under_its_readers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds only after building that another was quicker uses the other's folder."""
    policy = given(store, "policy", parts=PARTS)
    folder = store.folder(policy, "checkpoint")
    before = folder.stat().st_ino
    looks, look = [0], cache._is_whole

    def too_early(*args: Any) -> bool:
        looks[0] += 1
        return looks[0] > 1 and look(*args)

    monkeypatch.setattr(cache, "_is_whole", too_early)
    assert store.folder(policy, "checkpoint") == folder
    assert (looks[0], folder.stat().st_ino) == (2, before)


def test_a_part_that_the_artifact_lacks_is_refused_by_name(store: Store) -> None:
    with pytest.raises(NotFoundError, match=r"has no part 'adapter'.*\n.*checkpoint, "):
        store.folder(stored_policy(store), "adapter")


def test_scanning_an_artifact_gives_exactly_its_files(any_store: Store, rollouts: Manifest) -> None:
    folder = artifact_folder("rollouts", rollouts.key)
    stray = any_store.storage.read(f"{folder}/{rollouts.table_files('steps')[0].path}")
    any_store.storage.put_if_absent(f"{folder}/data/steps/00009-000000000000.parquet", stray)
    for ref in (rollouts, rollouts.ref, str(rollouts.ref), f"rollouts/{rollouts.key}"):
        frame = scan(ref, "steps", store=any_store)
        assert frame.select("episode_id").collect().height == 6
    assert scan(rollouts, "steps", store=any_store).filter(episode_id="t001-0").collect().height == 1
    assert scan(rollouts, "steps", store=any_store.url).collect().height == 6


def test_scanning_a_run_labels_every_iteration(any_store: Store) -> None:
    stored_run(any_store, "demo", iterations=2)
    steps = scan("demo", "steps", store=any_store).collect()
    assert steps.columns[:3] == ["run", "iteration", "episode_id"]
    assert steps.group_by("run", "iteration").len().sort("iteration").rows() == [("demo", 0, 6), ("demo", 1, 6)]
    metrics = scan("demo", "metrics", store=any_store).collect()
    assert metrics.select("run", "iteration", "name").rows() == [("demo", 0, "loss"), ("demo", 1, "loss")]
    assert metrics.columns.count("run") == 1
    assert scan("demo", "probe", store=any_store).collect().height == 2, "the policy that sampled is not its product"


def test_a_run_says_what_it_does_not_have(store: Store) -> None:
    stored_run(store, "demo", iterations=1)
    with pytest.raises(NotFoundError, match="no table 'task_scores'"):
        scan("demo", "task_scores", store=store)
    with pytest.raises(NotFoundError, match="did you mean 'steps'"):
        scan("demo", "step", store=store)
    with pytest.raises(NotFoundError, match="did you mean 'demo'"):
        scan("dem", "steps", store=store)


def test_the_store_to_scan_comes_from_the_environment(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored_run(store, "demo", iterations=1)
    monkeypatch.setenv("ROLLMILL_STORE", store.url)
    assert scan("demo", "tasks").collect().height == 3
    monkeypatch.delenv("ROLLMILL_STORE")
    monkeypatch.chdir(tmp_path)
    assert scan("demo", "tasks").collect().height == 3, "./store is the default"
    monkeypatch.chdir("/")
    with pytest.raises(NotFoundError, match="no store at /store"):
        scan("demo", "tasks")


@pytest.mark.parametrize(("change", "said"), DAMAGES[1:])
def test_scanning_names_a_file_that_is_gone_or_cut(store: Store, change: Any, said: str) -> None:
    tasks = stored_tasks(store)
    damage(store, tasks, "tasks", change)
    with pytest.raises(CorruptError, match=said):
        scan(tasks, "tasks", store=store)


def test_a_query_plan_over_s3_holds_no_credential(s3_store: Store) -> None:
    tasks = stored_tasks(s3_store)
    frame = scan(tasks, "tasks", store=s3_store)
    assert frame.collect().height == 3
    for text in (frame.explain(), frame.serialize().decode("latin-1"), repr(s3_store.storage.__dict__)):
        assert "rollmill-test-secret" not in text
        assert "rollmill-test-id" not in text


def test_credentials_of_a_profile_serve_for_scanning_too(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Credentials need not be in the environment themselves."""
    (tmp_path / "credentials").write_text("[other]\naws_access_key_id = id\naws_secret_access_key = secret\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "other")
    store = open_store(s3_url)
    assert scan(stored_tasks(store), "tasks", store=store).collect().height == 3


def test_a_scan_sees_no_partition_in_a_path(tmp_path: Path) -> None:
    """A store below a folder called ``run=001`` gains no column."""
    store = open_store(tmp_path / "run=001" / "[store]")
    assert scan(stored_tasks(store), "tasks", store=store).collect().columns == TABLES["tasks"].schema.names
