"""Fixtures that every test may use: stores on each kind of storage, and the real data beside the repository."""

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts.store import Store, open_store

pytest_plugins = ["tests.suite", "tests.flows.trained", "tests.stages.rollouts.live"]

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "rollmill-test-id",
    "AWS_SECRET_ACCESS_KEY": "rollmill-test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the user's cache of local copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLMILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("ROLLMILL_STORE", raising=False)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store in a local folder."""
    return open_store(tmp_path / "store")


@pytest.fixture
def memory_store() -> Store:
    """An empty store in this process's memory."""
    return open_store(f"memory://{secrets.token_hex(8)}")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A real HTTP server that speaks S3, in a thread of this process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def _s3_session_client(s3_endpoint: str) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        region_name=S3_ENVIRONMENT["AWS_DEFAULT_REGION"],
        aws_access_key_id=S3_ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=S3_ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    )


@pytest.fixture
def s3_client(s3_endpoint: str, _s3_session_client: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plain S3 client for that server; the environment holds endpoint and credentials, as a user's would."""
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    return _s3_session_client


@pytest.fixture
def s3_url(s3_client: Any) -> str:
    """URL of an empty store in a bucket of its own."""
    bucket = f"rollmill-{secrets.token_hex(8)}"
    s3_client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/shelf"


@pytest.fixture
def s3_store(s3_url: str) -> Store:
    """An empty store on S3."""
    return open_store(s3_url)


@pytest.fixture(params=["local", "memory", "s3"])
def any_store(request: pytest.FixtureRequest) -> Store:
    """An empty store, on each kind of storage in turn."""
    names = {"local": "store", "memory": "memory_store", "s3": "s3_store"}
    found: Store = request.getfixturevalue(names[request.param])
    return found


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets; a test that needs it and does not find it says so."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real data sets are not at {SHARED_DATA}")
    return SHARED_DATA
