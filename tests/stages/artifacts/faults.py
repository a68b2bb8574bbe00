"""A storage that fails on purpose: it wraps a real one and counts the calls that change something."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stages.artifacts.storage import Entry, Storage
from stages.artifacts.store import Store


class Crash(BaseException):
    """The process would be gone here; nothing in Rollmill may catch it."""


class FaultyStorage(Storage):
    """Passes everything on to ``inner``.

    Args:
        at: number of the changing call (1, 2, …) at which ``fault`` is called; None: never.
        after: whether the fault comes after the change was made, so that only its answer is lost.
        lose_answers: every successful ``put_if_absent`` is reported as "exists", as an S3 client does that
            retried after a lost response.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        at: int | None = None,
        after: bool = False,
        lose_answers: bool = False,
        fault: Callable[[], Any] | None = None,
    ):
        self.url = inner.url
        self.n_changes = 0
        self._inner, self._at, self._after, self._lose = inner, at, after, lose_answers
        self._fault = fault or _crash

    def put_if_absent(self, path: str, data: bytes | Path) -> bool:
        self._count(before=True)
        created = self._inner.put_if_absent(path, data)
        self._count(before=False)
        return created and not self._lose

    def delete(self, path: str) -> None:
        self._count(before=True)
        self._inner.delete(path)
        self._count(before=False)

    def read(self, path: str) -> bytes:
        return self._inner.read(path)

    def download(self, path: str, target: Path) -> None:
        self._inner.download(path, target)

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def entries(self, folder: str) -> Iterator[Entry]:
        return self._inner.entries(folder)

    def names(self, folder: str) -> list[str]:
        return self._inner.names(folder)

    def open_for_writing(self) -> None:
        self._inner.open_for_writing()

    def root_exists(self) -> bool:
        return self._inner.root_exists()

    def local_path(self, path: str) -> Path | None:
        return self._inner.local_path(path)

    def polars_source(self, path: str) -> tuple[Any, dict[str, Any]]:
        return self._inner.polars_source(path)

    def _count(self, *, before: bool) -> None:
        self.n_changes += before
        if self.n_changes == self._at and before is not self._after:
            self._fault()


def faulty(store: Store, **faults: Any) -> tuple[Store, FaultyStorage]:
    """A second store on the same shelf, whose storage has these faults."""
    storage = FaultyStorage(store.storage, **faults)
    return Store(storage, writable=True), storage


def _crash() -> None:
    raise Crash
