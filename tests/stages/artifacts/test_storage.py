"""One conformance suite for every storage: what the commit protocol leans on."""

import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import StoreError
from stages.artifacts import storage_fsspec
from stages.artifacts.storage import Storage, check_exclusive, open_storage
from stages.artifacts.store import Store


@pytest.fixture
def storage(any_store: Store) -> Storage:
    return any_store.storage


def test_an_object_is_created_once_and_keeps_its_first_content(storage: Storage) -> None:
    assert storage.put_if_absent("a/b.json", b"first") is True
    assert storage.put_if_absent("a/b.json", b"second") is False
    assert storage.read("a/b.json") == b"first"


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_files_and_bytes_of_any_size_are_put_whole(storage: Storage, tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "source").write_bytes(content)
    assert storage.put_if_absent("from-file", tmp_path / "source")
    assert storage.put_if_absent("from-bytes", content)
    assert not storage.put_if_absent("from-file", tmp_path / "source")
    storage.download("from-file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == storage.read("from-bytes") == content


def test_an_upload_in_parts_is_created_once_too(s3_store: Store, tmp_path: Path) -> None:
    storage = s3_store.storage
    (tmp_path / "large").write_bytes(b"\0" * (110 * 2**20))
    assert storage.put_if_absent("large", tmp_path / "large")
    (tmp_path / "large").write_bytes(b"\1" * (110 * 2**20))
    assert not storage.put_if_absent("large", tmp_path / "large")
    storage.download("large", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size == 110 * 2**20
    with open(tmp_path / "copy", "rb") as copy:
        assert copy.read(1) == b"\0"


def test_of_many_writers_exactly_one_wins_and_all_read_its_content(storage: Storage) -> None:
    for race in range(5):
        start = threading.Barrier(8)
        won: list[int] = []

        def write(number: int, path: str, start: threading.Barrier = start, won: list[int] = won) -> None:
            start.wait()
            if storage.put_if_absent(path, f"writer {number}".encode() * 1000):
                won.append(number)

        threads = [threading.Thread(target=write, args=(n, f"race/{race}")) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storage.read(f"race/{race}") == f"writer {won[0]}".encode() * 1000


def test_what_is_missing_is_a_file_not_found_error(storage: Storage, tmp_path: Path) -> None:
    assert not storage.exists("nothing")
    with pytest.raises(FileNotFoundError):
        storage.read("nothing")
    with pytest.raises(FileNotFoundError):
        storage.download("nothing", tmp_path / "copy")
    assert list(storage.entries("nothing")) == []
    assert storage.names("nothing") == []
    storage.delete("nothing")


def test_listings_see_every_change_at_once(storage: Storage) -> None:
    storage.put_if_absent("a/1/x", b"12")
    assert storage.names("a") == ["1"]
    assert not storage.exists("a/2")
    assert not storage.exists("a/1"), "a folder is no object"
    storage.put_if_absent("a/2", b"345")
    assert storage.names("a") == ["1", "2"]
    assert storage.names("") == ["a"]
    found = {entry.path: entry for entry in storage.entries("a")}
    assert {path: entry.bytes for path, entry in found.items()} == {"a/1/x": 2, "a/2": 3}
    assert all(abs(entry.modified - time.time()) < 60 for entry in found.values())
    storage.delete("a/1/x")
    assert not storage.exists("a/1/x")
    assert storage.names("a") == ["2"]


def test_listings_see_what_another_process_changed(s3_url: str) -> None:
    one, other = open_storage(s3_url), open_storage(s3_url)
    one.put_if_absent("a/1", b"1")
    assert other.names("a") == ["1"]
    assert not other.exists("a/2")
    one.put_if_absent("a/2", b"1")
    one.delete("a/1")
    assert other.names("a") == ["2"]
    assert [entry.path for entry in other.entries("a")] == ["a/2"]
    assert (other.exists("a/1"), other.exists("a/2")) == (False, True)


def test_a_deleted_object_can_be_created_again(storage: Storage) -> None:
    storage.put_if_absent("a", b"1")
    storage.delete("a")
    assert storage.put_if_absent("a", b"2")
    assert storage.read("a") == b"2"


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/etc/passwd"])
def test_no_path_leaves_the_store(storage: Storage, path: str) -> None:
    for use in (storage.read, storage.exists, storage.delete, lambda p: storage.put_if_absent(p, b"")):
        with pytest.raises(StoreError, match="leave the store"):
            use(path)


def test_the_test_of_a_storage_leaves_nothing_behind(storage: Storage) -> None:
    assert check_exclusive(storage)
    assert list(storage.entries("")) == []


def test_a_storage_survives_pickling(storage: Storage) -> None:
    storage.put_if_absent("a", b"1")
    assert pickle.loads(pickle.dumps(storage)).read("a") == b"1"


@pytest.mark.parametrize("link", [os.link, os.symlink, None])
def test_a_stored_file_shares_nothing_with_a_users_file(store: Store, tmp_path: Path, link: Any) -> None:
    """A stage may hand over a link; changing the user's file later must not change the store."""
    users = tmp_path / "users"
    users.write_bytes(b"as it was")
    scratch = Path(store.url) / ".tmp-work-1"
    scratch.mkdir(parents=True)
    if link is not None:
        link(users, scratch / "file")
    store.storage.put_if_absent("a", users if link is None else scratch / "file")
    users.write_bytes(b"changed")
    assert store.storage.read("a") == b"as it was"
    assert users.stat().st_mode & 0o200
    stored = Path(store.url) / "a"
    assert (stored.is_symlink(), stored.stat().st_nlink) == (False, 1)


def test_a_scratch_file_is_moved_and_not_copied(store: Store) -> None:
    scratch = Path(store.url) / ".tmp-work-1"
    scratch.mkdir(parents=True)
    (scratch / "file").write_bytes(b"1")
    store.storage.put_if_absent("a", scratch / "file")
    assert (Path(store.url) / "a").stat().st_ino == (scratch / "file").stat().st_ino


def test_a_killed_local_writer_leaves_no_visible_object(store: Store) -> None:
    """A temporary file is all that a writer leaves that dies before its link."""
    root = Path(store.url)
    (root / "a").mkdir(parents=True)
    (root / "a" / ".tmp-0123").write_bytes(b"hal")
    assert not store.storage.exists("a/b.json")
    assert store.storage.put_if_absent("a/b.json", b"whole")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks up open files in /proc")
@pytest.mark.parametrize("from_file", [False, True])
def test_a_local_object_is_durable_before_it_is_visible(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_file: bool
) -> None:
    """The file is synced, then linked, then its folder and every new folder above it is synced."""
    root, happened = Path(store.url), list[str]()
    sync, link = os.fsync, os.link

    def watched_sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        happened.append(f"sync {path.relative_to(root) if path.is_dir() and root in path.parents else path.name[:4]}")
        sync(descriptor)

    def watched_link(source: Path, target: Path) -> None:
        happened.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "link", watched_link)
    (tmp_path / "source").write_bytes(b"1")
    root.mkdir()
    store.storage.put_if_absent("a/b/c.json", tmp_path / "source" if from_file else b"1")
    assert happened == ["sync .tmp", "link", "sync a/b", "sync a", "sync stor"]


def test_stored_files_cannot_be_written_in_place(store: Store) -> None:
    store.storage.put_if_absent("a/b.json", b"1")
    assert (Path(store.url) / "a" / "b.json").stat().st_mode & 0o222 == 0


@pytest.mark.parametrize(
    "url",
    ["s3://key:secret@bucket/prefix", "s3://bucket/prefix?endpoint=x", "https://me:pw@host/x"],
)
def test_a_url_with_a_credential_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(StoreError, match="environment") as caught:
        open_storage(url)
    assert "secret" not in str(caught.value)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(("url", "said"), [("s3:///prefix", "no bucket"), ("nosuch://x", "no storage is known")])
def test_a_malformed_url_is_refused(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        open_storage(url)


def test_a_conflict_is_tried_again(s3_url: str, s3_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 409 where two conditional writes meet; that is no answer about who won."""
    storage = open_storage(s3_url)
    answers: list[int] = []
    send = storage._fs.pipe_file  # type: ignore[attr-defined]

    def conflict_twice(*args: Any, **kwargs: Any) -> Any:
        answers.append(409)
        if len(answers) < 3:
            raise _answer(409, "ConditionalRequestConflict")
        return send(*args, **kwargs)

    monkeypatch.setattr(storage._fs, "pipe_file", conflict_twice)  # type: ignore[attr-defined]
    assert storage.put_if_absent("a", b"1") is True
    assert len(answers) == 3


def test_a_412_without_a_condition_in_its_body_means_that_another_was_first(
    s3_url: str, s3_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every server names the condition, and then the library gives a plain OSError."""
    storage = open_storage(s3_url)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _answer(412, "PreconditionFailed")

    monkeypatch.setattr(storage._fs, "pipe_file", refuse)  # type: ignore[attr-defined]
    assert storage.put_if_absent("a", b"1") is False


def test_a_refused_credential_is_a_store_error_without_the_secret(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, s3_client: Any
) -> None:
    storage = open_storage("s3://no-such-bucket-anywhere/x")
    with pytest.raises(StoreError, match="bucket") as caught:
        storage.put_if_absent("a", b"1")
    assert "rollmill-test-secret" not in str(caught.value)


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, s3_client: Any) -> None:
    monkeypatch.setattr(storage_fsspec, "READ_TIMEOUT_S", 0.1)
    monkeypatch.setattr(storage_fsspec, "S3_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        storage = open_storage("s3://bucket/prefix")
        with pytest.raises(StoreError, match="imeout"):
            storage.put_if_absent("a", b"1")
        with pytest.raises(StoreError, match="imeout"):
            storage.read("a")


def _answer(status: int, code: str) -> OSError:
    """The error that the S3 library makes of such an answer."""
    import botocore.exceptions
    import s3fs.errors

    error = botocore.exceptions.ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"
    )
    translated: OSError = s3fs.errors.translate_boto_error(error)
    return translated
