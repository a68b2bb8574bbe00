"""The commit protocol: one artifact, whoever works on it and whenever it is stopped."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from schemas.artifacts import Manifest, Plan
from schemas.errors import ConfigError, CorruptError, InputError, StageFailed, StoreError
from stages.artifacts import commit
from stages.artifacts.commit import finish, lookup, materialise, prepare, run_shard
from stages.artifacts.layout import artifact_folder, manifest_path, plan_path
from stages.artifacts.store import Store, open_store
from stages.artifacts.verify import verify
from tests.builders import NumbersExecution, given, numbers_request, stored_tasks, task_rows
from tests.stages.artifacts.faults import Crash, faulty

N_CHANGES = 11
"""Changing calls of ``numbers_request()``: plan, three shards of table, file and receipt, manifest."""


def forked(work: Callable[[], None]) -> int:
    """Starts ``work`` in a process of its own and returns its id; the process never comes back to the tests."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rows(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    return store.inputs({"it": [manifest]}).scan("it", "tasks").sort("task_id").collect().to_dicts()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """Digest and rows of the work when nothing goes wrong."""
    store = open_store(tmp_path_factory.mktemp("whole"))
    manifest = materialise(store, numbers_request()).manifest
    return manifest.digest, rows(store, manifest)


def test_an_artifact_is_made_once_and_found_again(any_store: Store, tmp_path: Path) -> None:
    execution = NumbersExecution(log=str(tmp_path / "log"))
    first = materialise(any_store, numbers_request(execution=execution))
    again = materialise(any_store, numbers_request(execution=execution))
    assert (first.cached, again.cached) == (False, True)
    assert again.manifest == first.manifest == any_store.manifest(first.manifest.ref)
    assert (tmp_path / "log").read_text().split() == ["00000", "00001", "00002"]
    assert len(rows(any_store, first.manifest)) == 12
    assert first.manifest.summary == {"n_tasks": 12}
    assert verify(any_store, first.manifest) > 0


def test_every_kind_of_storage_gives_the_same_digest(
    any_store: Store, uninterrupted: tuple[str, list[dict[str, Any]]]
) -> None:
    manifest = materialise(any_store, numbers_request()).manifest
    assert (manifest.digest, rows(any_store, manifest)) == uninterrupted


@pytest.mark.parametrize("after", [False, True], ids=["before the change", "after the change"])
def test_work_that_crashed_at_any_change_is_finished_by_the_same_call(
    any_store: Store, after: bool, memory_store: Store, tmp_path: Path
) -> None:
    for at in range(1, N_CHANGES + 1):
        log = tmp_path / f"log{at}"
        request = numbers_request(draw=at, execution=NumbersExecution(log=str(log)))
        crashing, storage = faulty(any_store, at=at, after=after)
        with pytest.raises(Crash):
            materialise(crashing, request)
        assert storage.n_changes == at
        manifest_is_there = at == N_CHANGES and after
        assert (lookup(any_store, request) is not None) is manifest_is_there
        outcome = materialise(any_store, request)
        assert outcome.cached is manifest_is_there
        assert len(log.read_text().split()) <= 4, "at most the shard in flight is redone"
        verify(any_store, outcome.manifest)
        whole = materialise(open_store(f"{memory_store.url}-whole"), request).manifest
        assert outcome.manifest.digest == whole.digest
        assert rows(any_store, outcome.manifest) == rows(open_store(f"{memory_store.url}-whole"), whole)


def test_the_count_of_changes_is_complete(store: Store) -> None:
    counting, storage = faulty(store)
    materialise(counting, numbers_request())
    assert storage.n_changes == N_CHANGES


@pytest.mark.parametrize("at", range(1, N_CHANGES + 1))
def test_a_process_killed_inside_any_write_leaves_a_store_that_the_same_call_finishes(
    at: int, store: Store, uninterrupted: tuple[str, list[dict[str, Any]]]
) -> None:
    """SIGKILL between the temporary file and its link: the worst moment on a file system."""

    def work_until_killed() -> None:
        links, link = [0], os.link

        def killed_at_link(*args: Any, **kwargs: Any) -> None:
            links[0] += 1
            if links[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            link(*args, **kwargs)

        os.link = killed_at_link
        materialise(store, numbers_request())

    assert exit_code(forked(work_until_killed)) == -signal.SIGKILL
    left = [entry.path for entry in store.storage.entries("") if "/.tmp-" in entry.path]
    assert len(left) == 1
    outcome = materialise(store, numbers_request())
    assert (outcome.manifest.digest, rows(store, outcome.manifest)) == uninterrupted
    verify(store, outcome.manifest)


WORKER = """
import sys
from stages.artifacts.commit import materialise
from stages.artifacts.store import open_store
from tests.builders import NumbersExecution, numbers_request
url, by_chance, pause_s, log = sys.argv[1], sys.argv[2] == "1", float(sys.argv[3]), sys.argv[4]
execution = NumbersExecution(pause_s=pause_s, log=log)
outcome = materialise(open_store(url), numbers_request(by_chance=by_chance, execution=execution))
print(outcome.manifest.nonce, outcome.manifest.digest)
"""


def worker(url: str, *, by_chance: bool = False, pause_s: float = 0.0, log: Path) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", WORKER, url, str(int(by_chance)), str(pause_s), str(log)]
    root = Path(__file__).resolve().parents[3]
    return subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "sign", ["plan.json", "data/tasks", "receipts/00000.json", "receipts/00001.json", "receipts/00002.json"]
)
def test_a_command_killed_at_any_stage_of_its_work_is_finished_by_the_next(
    sign: str, store: Store, tmp_path: Path, uninterrupted: tuple[str, list[dict[str, Any]]]
) -> None:
    request = numbers_request()
    awaited = Path(store.url) / artifact_folder("tasks", request.key) / sign
    process = worker(store.url, pause_s=0.05, log=tmp_path / "log")
    while not awaited.exists():
        assert process.poll() is None, "the worker ended before it could be killed"
        time.sleep(0.001)
    process.kill()
    process.communicate()
    outcome = materialise(store, request)
    assert (outcome.manifest.digest, rows(store, outcome.manifest)) == uninterrupted
    verify(store, outcome.manifest)


@pytest.mark.parametrize("n_writers", [2, 8])
def test_writers_side_by_side_agree_on_one_manifest(any_store: Store, n_writers: int) -> None:
    """Each would make other content; all must end with the same."""
    start, outcomes = threading.Barrier(n_writers), []

    def write() -> None:
        request = numbers_request(by_chance=True)
        start.wait()
        outcomes.append(materialise(any_store, request).manifest)

    threads = [threading.Thread(target=write) for _ in range(n_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == n_writers
    assert len({manifest.nonce for manifest in outcomes}) == 1
    assert len({row["answer"] for row in rows(any_store, outcomes[0])}) == 3, "one making of each of three shards"
    verify(any_store, outcomes[0])


@pytest.mark.parametrize("kind", ["store", "s3_store"])
def test_two_commands_side_by_side_agree_on_one_manifest(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = request.getfixturevalue(kind)
    workers = [worker(store.url, by_chance=True, pause_s=0.05, log=tmp_path / "log") for _ in range(2)]
    answers = [process.communicate()[0].split() for process in workers]
    assert [process.returncode for process in workers] == [0, 0]
    assert len({nonce for nonce, _ in answers}) == 1
    manifest = lookup(store, numbers_request(by_chance=True))
    assert manifest is not None
    assert [manifest.nonce, manifest.digest] == answers[0]
    verify(store, manifest)


def test_eight_processes_side_by_side_agree_on_one_manifest(store: Store, tmp_path: Path) -> None:
    request = numbers_request(by_chance=True)

    def work() -> None:
        while not (tmp_path / "start").exists():
            time.sleep(0.001)
        (tmp_path / str(os.getpid())).write_text(materialise(store, request).manifest.nonce)

    children = [forked(work) for _ in range(8)]
    (tmp_path / "start").touch()
    assert [exit_code(child) for child in children] == [0] * 8
    manifest = lookup(store, request)
    assert manifest is not None
    assert {(tmp_path / str(child)).read_text() for child in children} == {manifest.nonce}
    verify(store, manifest)


def test_a_writer_whose_answers_are_all_lost_recognises_its_own_objects(
    any_store: Store, uninterrupted: tuple[str, list[dict[str, Any]]]
) -> None:
    deaf, _ = faulty(any_store, lose_answers=True)
    outcome = materialise(deaf, numbers_request())
    assert outcome.manifest.digest == uninterrupted[0]
    assert any_store.manifest(outcome.manifest.ref).nonce == outcome.manifest.nonce
    verify(any_store, outcome.manifest)


def test_the_loser_of_a_plan_follows_the_winners(store: Store) -> None:
    winner = prepare(store, numbers_request())
    loser = prepare(store, numbers_request(execution=NumbersExecution(n_shards=7)))
    assert loser == winner
    assert len(loser.shards) == 3


def test_the_loser_of_a_shard_uses_the_winners_receipt(store: Store) -> None:
    """Both have worked; the second one's file is left over and named by nobody."""
    request = numbers_request(by_chance=True, n_shards=1)
    plan = prepare(store, request)
    raced: list[Any] = []

    class Racing(type(request.stage)):  # type: ignore[misc]
        def work(self, *arguments: Any) -> Any:
            raced.append(run_shard(store, request, plan, "00000"))
            return super().work(*arguments)

    slower = commit.Request(Racing(), request.config, request.execution, {}, request.seed)
    assert slower.key == request.key
    receipt = run_shard(store, slower, plan, "00000")
    assert receipt == raced[0]
    manifest = finish(store, request, plan)
    assert [entry.sha256 for entry in manifest.table_files("tasks")] == [
        entry.sha256 for entry in receipt.files if entry.table == "tasks"
    ]
    assert len(store.storage.names(f"{artifact_folder('tasks', request.key)}/data/tasks")) == 2


def test_refused_work_writes_nothing(store: Store) -> None:
    with pytest.raises(InputError, match="no rows"):
        materialise(store, numbers_request(n_rows=0))
    assert not Path(store.url).exists()


def test_a_failing_shard_keeps_what_is_finished_and_names_itself(store: Store) -> None:
    request = numbers_request(execution=NumbersExecution(fail_at=1))
    with pytest.raises(RuntimeError, match="the work failed") as caught:
        materialise(store, request)
    assert caught.value.__notes__ == [f"in shard 00001 of {request.name}"]
    assert store.storage.names(f"{artifact_folder('tasks', request.key)}/receipts") == ["00000.json"]
    assert lookup(store, request) is None


def test_an_artifact_is_not_finished_before_all_its_shards_are(store: Store) -> None:
    request = numbers_request()
    plan = prepare(store, request)
    run_shard(store, request, plan, "00001")
    with pytest.raises(StageFailed, match="2 of 3 shards"):
        finish(store, request, plan)
    assert lookup(store, request) is None


def test_shards_may_be_done_in_any_order_and_twice(
    store: Store, uninterrupted: tuple[str, list[dict[str, Any]]]
) -> None:
    def backwards(function: Any, shard_ids: Any) -> None:
        for shard_id in [*reversed(shard_ids), *shard_ids]:
            function(shard_id)

    assert materialise(store, numbers_request(), map_shards=backwards).manifest.digest == uninterrupted[0]


def test_a_full_disk_is_told_and_leaves_nothing_committed(store: Store) -> None:
    """A limit on the size of files stands for the full disk; it ends with the child process."""
    request = numbers_request(n_shards=1, n_rows=2000)
    plan = prepare(store, request)

    def work_with_a_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(StoreError, match="cannot be written"):
            run_shard(store, request, plan, "00000")

    assert exit_code(forked(work_with_a_limit)) == 0
    assert {entry.path for entry in store.storage.entries("")} == {plan_path("tasks", request.key)}


def test_progress_is_told_by_shard(store: Store) -> None:
    told: list[tuple[str, int, int]] = []
    materialise(store, numbers_request(n_shards=2), progress=lambda *args: told.append(args))
    assert told == [("00000", 4, 4), ("00001", 4, 4)]


def test_a_store_opened_for_reading_is_not_written(store: Store) -> None:
    stored_tasks(store)
    with pytest.raises(StoreError, match="for reading"):
        materialise(open_store(store.url, writable=False), numbers_request())


def test_a_finished_shard_whose_file_is_gone_is_not_committed(any_store: Store) -> None:
    request = numbers_request()
    plan = prepare(any_store, request)
    receipts = [run_shard(any_store, request, plan, shard.id) for shard in plan.shards]
    lost = f"{artifact_folder('tasks', request.key)}/{receipts[1].files[0].path}"
    any_store.storage.delete(lost)
    with pytest.raises(CorruptError, match="gone") as caught:
        finish(any_store, request, plan)
    assert lost in str(caught.value)
    assert lookup(any_store, request) is None


def test_a_leftover_file_is_reused_only_if_its_content_fits(any_store: Store) -> None:
    request = numbers_request(n_shards=1)
    plan = prepare(any_store, request)
    path = f"{artifact_folder('tasks', request.key)}/{run_shard(any_store, request, plan, '00000').files[0].path}"
    any_store.storage.delete(f"{artifact_folder('tasks', request.key)}/receipts/00000.json")
    content = any_store.storage.read(path)
    run_shard(any_store, request, plan, "00000")
    any_store.storage.delete(f"{artifact_folder('tasks', request.key)}/receipts/00000.json")
    any_store.storage.delete(path)
    any_store.storage.put_if_absent(path, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptError, match="does not fit"):
        run_shard(any_store, request, plan, "00000")


def test_every_json_object_is_created_once(store: Store) -> None:
    """A second run over finished work, with another execution, changes no byte of the store."""

    def state() -> dict[str, tuple[float, bytes]]:
        return {entry.path: (entry.modified, store.storage.read(entry.path)) for entry in store.storage.entries("")}

    request = numbers_request()
    plan = prepare(store, request)
    materialise(store, request)
    before = state()
    for shard in plan.shards:
        run_shard(store, request, plan, shard.id)
    finish(store, numbers_request(execution=NumbersExecution(pause_s=0.001)), prepare(store, request))
    assert state() == before
    assert not [path for path in before if "=" in path]


def test_an_old_plan_that_is_taken_up_again_is_marked(store: Store) -> None:
    """Garbage collection goes by age; whoever continues old work says so."""
    request = numbers_request()
    old = Plan(
        kind="tasks",
        key=request.key,
        stage="numbers",
        shards=[],
        created_at=datetime.now(UTC) - timedelta(days=30),
        nonce="n",
    )
    store.storage.put_if_absent(plan_path("tasks", request.key), old.model_dump_json().encode())
    assert prepare(store, request) == old
    leases = [name for name in store.storage.names(artifact_folder("tasks", request.key)) if "lease" in name]
    assert len(leases) == 1


def test_a_table_that_breaks_its_contract_is_never_stored(store: Store) -> None:
    doubled = task_rows(1) + task_rows(1)
    with pytest.raises(ValueError, match="share an id"):
        given(store, "tasks", {"tasks": doubled})
    assert not [entry for entry in store.storage.entries("artifacts") if "/data/" in entry.path]


def test_a_part_made_twice_is_refused(store: Store) -> None:
    request = numbers_request(n_shards=2)

    class SameName(type(request.stage)):  # type: ignore[misc]
        def work(self, *arguments: Any) -> Any:
            output = super().work(*arguments)
            output.files = [commit.FileOutput("page", "note.txt", output.files[0].path)]
            return output

    with pytest.raises(ValueError, match=r"page/note\.txt"):
        materialise(store, commit.Request(SameName(), request.config, request.execution, {}, 7))


def test_a_manifest_says_how_its_artifact_was_made(store: Store) -> None:
    manifest = materialise(store, numbers_request(execution=NumbersExecution(pause_s=0.01))).manifest
    assert (manifest.seed, manifest.draw, manifest.stage, manifest.stage_version) == (7, 0, "numbers", 1)
    assert manifest.schema_versions == {"tasks": 1}
    assert manifest.config == {"n_shards": 3, "n_rows": 4, "by_chance": False}
    assert manifest.execution["pause_s"] == 0.01
    assert {"python", "pyarrow", "polars", "torch"} <= manifest.libraries.keys()
    assert manifest.started_at <= manifest.finished_at
    assert manifest.work_s >= 0.03
    assert sum(entry.rows or 0 for entry in manifest.files) == 12


def test_a_reused_artifact_of_other_code_says_what_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = commit.code_version()
    older = now.model_copy(update={"version": "0.0.1", "commit": "0" * 40, "dirty": False})
    libraries = {**commit.library_versions(), "polars": "0.1"}
    with monkeypatch.context() as patch:
        patch.setattr(commit, "code_version", lambda: older)
        patch.setattr(commit, "library_versions", lambda: libraries)
        assert materialise(store, numbers_request()).notes == []
    (note,) = materialise(store, numbers_request()).notes
    assert f"rollmill 0.0.1 -> {now.version}" in note
    assert "commit 000000000000 -> " in note
    assert "polars 0.1 -> " in note


def test_a_truncated_manifest_is_named_and_not_taken_for_missing(store: Store) -> None:
    request = numbers_request()
    materialise(store, request)
    path = Path(store.url) / manifest_path("tasks", request.key)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptError, match=r"manifest\.json is damaged"):
        materialise(store, request)


@pytest.mark.parametrize("value", ["https://user:private@host/v1", "http://host/?api_key=hush"])
def test_a_config_that_holds_a_credential_is_refused(value: str) -> None:
    class Config(commit.ConfigModel):
        url: str

    with pytest.raises(ConfigError, match="credential") as caught:
        commit.Request(numbers_request().stage, Config(url=value), NumbersExecution(), {}, 7)
    assert "private" not in str(caught.value)
    assert "hush" not in str(caught.value)


def test_execution_settings_are_stored_without_their_credentials(store: Store) -> None:
    class Execution(NumbersExecution):
        workers: tuple[str, ...] = ("http://me:private@host:8000/v1", "http://other/?token=hush&x=1")
        api_key: str = "sk-quiet"
        max_tokens: int = 5

    manifest = materialise(store, numbers_request(execution=Execution())).manifest
    raw = store.storage.read(manifest_path("tasks", manifest.key)).decode()
    assert not [secret for secret in ("private", "hush", "quiet") if secret in raw]
    assert manifest.execution["workers"] == ["http://***@host:8000/v1", "http://other/?token=***&x=1"]
    assert manifest.execution["max_tokens"] == 5
