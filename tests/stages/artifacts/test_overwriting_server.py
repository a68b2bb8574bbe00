"""A real S3 server that answers 200 to conditional writes and overwrites: refused, unless one writer is accepted."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import StoreError
from stages.artifacts.store import open_store
from tests.conftest import S3_ENVIRONMENT


@pytest.fixture
def server_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder behind a running server with one bucket, ``shelf``; the environment leads S3 clients to it."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("rclone is not installed (the dev extra has it)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder = tmp_path / "served"
    (folder / "shelf").mkdir(parents=True)
    command = [program, "serve", "s3", "--addr", address, "--config", "", "--dir-cache-time", "0s", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0:
                    break
            time.sleep(0.02)
        for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{address}"}.items():
            monkeypatch.setenv(name, value)
        yield folder / "shelf"
    finally:
        process.terminate()
        process.wait()


def test_a_server_that_overwrites_is_refused_and_left_clean(server_folder: Path) -> None:
    with pytest.raises(StoreError, match="overwrites an object that is to be created once") as caught:
        open_store("s3://shelf/store")
    assert "single_writer" in str(caught.value)
    assert not [path for path in server_folder.rglob("*") if path.is_file()]


def test_one_writer_may_be_accepted_there(server_folder: Path) -> None:
    store = open_store("s3://shelf/store", single_writer=True)
    assert store.storage.put_if_absent("a/b.json", b"first")
    assert not store.storage.put_if_absent("a/b.json", b"second")
    assert (server_folder / "store" / "a" / "b.json").read_bytes() == b"first"
