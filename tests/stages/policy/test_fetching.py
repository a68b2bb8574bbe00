"""A model folder on remote storage is fetched once, completely, and by one process at a time."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import CorruptError, InputError, NotFoundError
from stages.artifacts import sweep
from stages.artifacts.store import Store
from stages.policy.fetching import CHECKSUMS, fetched_folder
from tests.stages.policy.test_importing import imported, request_for

FETCH = "import sys; from stages.policy.fetching import fetched_folder; print(fetched_folder(sys.argv[1]))"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def remote(s3_client: Any, s3_url: str, tiny_folder: Path, own_cache: Path) -> str:
    """URL of the tiny policy's folder in a bucket."""
    for file in tiny_folder.iterdir():
        put(s3_client, f"{s3_url}/tiny/{file.name}", file.read_bytes())
    return f"{s3_url}/tiny"


def put(client: Any, url: str, content: bytes) -> None:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    client.put_object(Bucket=bucket, Key=key, Body=content)


def test_a_model_in_a_bucket_is_the_same_policy_as_its_folder_here(store: Store, remote: str, tiny_folder: Path):
    assert request_for(remote).key == request_for(tiny_folder).key
    policy = imported(store, remote)
    weights = store.folder(policy, "checkpoint") / "model.safetensors"
    assert weights.read_bytes() == (tiny_folder / "model.safetensors").read_bytes()
    assert not (store.folder(policy, "checkpoint") / CHECKSUMS).exists()


def test_it_is_fetched_once_and_used_from_then_on(remote: str, own_cache: Path):
    copy = fetched_folder(remote)
    made = (copy / "model.safetensors").stat()
    assert fetched_folder(remote) == fetched_folder(f"{remote}/") == copy
    assert (copy / "model.safetensors").stat().st_ino == made.st_ino


def test_a_copy_that_nobody_has_used_for_long_goes(remote: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    copy = fetched_folder(remote)
    monkeypatch.setattr(sweep, "_SWEPT", set())
    sweep.sweep_once(own_cache.parent)
    assert copy.exists()
    os.utime(copy, (0, 0))
    monkeypatch.setattr(sweep, "_SWEPT", set())
    sweep.sweep_once(own_cache.parent)
    assert not copy.exists()


def test_two_processes_that_want_it_at_once_share_one_copy(remote: str, own_cache: Path, tiny_folder: Path):
    both = [subprocess.Popen([sys.executable, "-c", FETCH, remote], stdout=subprocess.PIPE, text=True) for _ in "ab"]
    told = {process.communicate(timeout=100)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (copy,) = told
    assert [path.name for path in own_cache.iterdir() if path.is_dir()] == [Path(copy).name]
    for file in tiny_folder.iterdir():
        assert (Path(copy) / file.name).read_bytes() == file.read_bytes()


def test_what_a_killed_process_left_is_not_taken_for_the_model(remote: str, own_cache: Path):
    copy = fetched_folder(remote)
    half = copy.with_name(f".{copy.name}-dead")
    copy.rename(half)
    (half / "model.safetensors").write_bytes(b"half")
    assert fetched_folder(remote) == copy
    assert len((copy / "model.safetensors").read_bytes()) > 4
    assert not half.exists()


def test_files_that_change_there_are_another_model(remote: str, s3_client: Any):
    before = request_for(remote).key
    put(s3_client, f"{remote}/generation_config.json", b'{"temperature": 0.5}')
    assert request_for(remote).key != before


def test_a_copy_that_was_changed_here_is_refused(remote: str):
    copy = fetched_folder(remote)
    (copy / "config.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"config\.json was changed"):
        fetched_folder(remote)


def test_nothing_there_and_nobody_there_are_told_apart(remote: str, s3_url: str):
    with pytest.raises(NotFoundError, match="there is no model at"):
        fetched_folder(f"{s3_url}/other")
    with pytest.raises(InputError, match="cannot be read"):
        fetched_folder("nosuch://bucket/model")
