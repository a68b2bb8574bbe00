"""Storage on an object store through fsspec: PUT with ``If-None-Match: *`` (S3), or the system's own form of it.

Credentials come from the environment and stay inside the file system object: no message, listing or
query plan holds them.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from schemas.errors import StoreError
from stages.artifacts.storage import Entry, Storage, contained

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
"""Without an answer for so long a request is tried again; the library's own default can wait for ever."""
S3_ATTEMPTS = 4
"""How often the S3 client tries a request; twice this for connections that break off."""
CONFLICT_RETRIES = 8
"""How often a 409 (two conditional writes met) is tried again, with growing pauses: 5 s in all."""

_MISSING_LIBRARY = {"s3": "pip install 'rollmill[s3]'", "gs": "pip install gcsfs", "az": "pip install adlfs"}


class FsspecStorage(Storage):
    """A prefix of a bucket."""

    def __init__(self, url: str, *, single_writer: bool = False):
        self.url = url.rstrip("/")
        self._scheme, _, self._root = self.url.partition("://")
        if not self._root.split("/")[0]:
            raise StoreError(f"the store URL {url} names no bucket", hint="write s3://BUCKET/PREFIX")
        self._single_writer = single_writer
        self._connection: tuple[int, Any] | None = None
        self._fs  # noqa: B018  a missing library is told here and not at the first use

    @property
    def _fs(self) -> Any:
        if self._connection is None or self._connection[0] != os.getpid():  # its event loop does not survive a fork
            self._connection = (os.getpid(), _connect(self._scheme))
        return self._connection[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}

    def put_if_absent(self, path: str, data: bytes | Path) -> bool:
        target = self._at(path)
        if self._single_writer and self.exists(path):  # the server's own condition may be worth nothing
            return False
        for attempt in range(CONFLICT_RETRIES + 1):
            try:
                if isinstance(data, Path):
                    self._fs.put_file(str(data), target, mode="create")
                else:
                    self._fs.pipe_file(target, bytes(data), mode="create")
                return True
            except FileExistsError:
                return False
            except Exception as error:
                status = _http_status(error)
                if status == 412:
                    return False
                if status == 409 and attempt < CONFLICT_RETRIES:
                    time.sleep(0.02 * 2**attempt)
                    continue
                raise self._fault("write", path, error) from error
        raise AssertionError("not reached")

    def read(self, path: str) -> bytes:
        with self._faults("read", path):
            return bytes(self._fs.cat_file(self._at(path)))

    def download(self, path: str, target: Path) -> None:
        with self._faults("read", path):
            self._fs.get_file(self._at(path), str(target))

    def exists(self, path: str) -> bool:
        with self._faults("look for", path):
            try:
                return bool(self._fs.info(self._at(path))["type"] == "file")
            except FileNotFoundError:
                return False

    def entries(self, folder: str) -> Iterator[Entry]:
        with self._faults("list", folder):
            try:
                found = self._fs.find(self._at(folder), detail=True)
            except FileNotFoundError:
                return
        for path, info in found.items():
            yield Entry(path[len(self._root) + 1 :], int(info["size"]), _modified(info))

    def names(self, folder: str) -> list[str]:
        with self._faults("list", folder):
            try:
                found = self._fs.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in found} - {self._at(folder).rsplit("/", 1)[-1]})

    def delete(self, path: str) -> None:
        with self._faults("delete", path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def open_for_writing(self) -> None:
        pass  # a bucket has no folders to make; the store's test shows whether it can be written

    def root_exists(self) -> bool:
        bucket = self._root.split("/")[0]
        with self._faults("open", ""):
            return bool(self._fs.exists(bucket))

    def polars_source(self, path: str) -> tuple[Any, dict[str, Any]]:
        if self._scheme not in ("s3", "s3a"):
            return f"{self.url}/{path}", {}
        options = {"aws_endpoint_url": self._endpoint(), "aws_region": self._region()}
        if str(options["aws_endpoint_url"] or "").startswith("http://"):
            options["aws_allow_http"] = "true"
        known = {name: value for name, value in options.items() if value}
        source = f"s3://{self._at(path)}"
        return source, {"storage_options": known, "credential_provider": S3Credentials()}

    def _endpoint(self) -> str | None:
        url = self._fs.client_kwargs.get("endpoint_url") or self._fs.endpoint_url
        return url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    def _region(self) -> str | None:
        return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"

    def _at(self, path: str) -> str:
        return f"{self._root}/{contained(path, self.url)}" if path else self._root

    @contextlib.contextmanager
    def _faults(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, StoreError):
            raise
        except Exception as error:
            raise self._fault(action, path, error) from error

    def _fault(self, action: str, path: str, error: Exception) -> StoreError:
        return StoreError(
            f"cannot {action} {self.url}/{path}: {type(error).__name__}: {error}",
            hint="check the bucket's name, the endpoint (AWS_ENDPOINT_URL) and the credentials in the environment",
        )


class S3Credentials:
    """Asks the environment for credentials when polars reads; a stored query plan holds none."""

    def __call__(self) -> tuple[dict[str, str], int | None]:
        import botocore.session

        found = botocore.session.get_session().get_credentials()
        if found is None:
            raise StoreError("no S3 credentials in the environment", hint="set AWS_ACCESS_KEY_ID or AWS_PROFILE")
        frozen = found.get_frozen_credentials()
        keys = {"aws_access_key_id": frozen.access_key, "aws_secret_access_key": frozen.secret_key}
        if frozen.token:
            keys["aws_session_token"] = frozen.token
        return keys, None


def _connect(scheme: str) -> Any:
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    try:
        if scheme in ("s3", "s3a"):
            options |= _s3_options()
        connected = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        hint = _MISSING_LIBRARY.get(scheme.removesuffix("a") if scheme == "s3a" else scheme)
        raise StoreError(f"stores at {scheme}:// need a library that is not installed: {error}", hint=hint) from error
    except ValueError as error:
        raise StoreError(
            f"no storage is known for {scheme}://", hint="use a folder, s3://bucket/prefix, gs://… or memory://…"
        ) from error
    if scheme in ("s3", "s3a"):
        connected.retries = 2
    return connected


def _s3_options() -> dict[str, Any]:
    import aiobotocore.session
    import botocore.handlers

    session = aiobotocore.session.AioSession()
    # A PUT would wait for "100 Continue" first, and that wait knows no time limit.
    session.unregister("before-call.s3", botocore.handlers.add_expect_header)
    limits = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"max_attempts": S3_ATTEMPTS, "mode": "standard"},
    }
    return {"session": session, "config_kwargs": limits}


def _http_status(error: BaseException | None) -> int | None:
    """HTTP status of the answer that caused ``error``; None where there was none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        error = error.__cause__ or error.__context__
    return None


def _modified(info: dict[str, Any]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value: Any = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    raise StoreError("the storage does not tell when an object was written, so nothing can be collected safely")
