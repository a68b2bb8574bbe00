"""Storage in this process's memory, shared by all stores of one ``memory://`` URL: for trials and tests."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stages.artifacts.storage import Entry, Storage, contained

_LOCK = threading.Lock()
_SHELVES: dict[str, dict[str, tuple[bytes, float]]] = {}


class MemoryStorage(Storage):
    """A dictionary behind a lock."""

    def __init__(self, name: str):
        self.url = f"memory://{name}"
        with _LOCK:
            self._objects = _SHELVES.setdefault(name, {})

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return MemoryStorage, (self.url.removeprefix("memory://"),)

    def put_if_absent(self, path: str, data: bytes | Path) -> bool:
        contained(path, self.url)
        content = data.read_bytes() if isinstance(data, Path) else bytes(data)
        with _LOCK:
            if path in self._objects:
                return False
            self._objects[path] = (content, time.time())
            return True

    def read(self, path: str) -> bytes:
        try:
            return self._objects[contained(path, self.url)][0]
        except KeyError:
            raise FileNotFoundError(f"{self.url}/{path}") from None

    def download(self, path: str, target: Path) -> None:
        target.write_bytes(self.read(path))

    def exists(self, path: str) -> bool:
        return contained(path, self.url) in self._objects

    def entries(self, folder: str) -> Iterator[Entry]:
        with _LOCK:
            found = list(self._objects.items())
        for path, (content, modified) in found:
            if not folder or path.startswith(f"{folder}/"):
                yield Entry(path, len(content), modified)

    def names(self, folder: str) -> list[str]:
        depth = len(folder) + 1 if folder else 0
        return sorted({entry.path[depth:].split("/")[0] for entry in self.entries(folder)})

    def delete(self, path: str) -> None:
        with _LOCK:
            self._objects.pop(contained(path, self.url), None)

    def open_for_writing(self) -> None:
        pass

    def root_exists(self) -> bool:
        return True
