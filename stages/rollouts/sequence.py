"""Token sequences that grow at the end and share memory with what they grew from."""

import numpy as np


class _Buffer:
    def __init__(self, size: int):
        self.array = np.empty(max(size, 64), dtype=np.int32)
        self.used = 0


class TokenSequence:
    """The first ``length`` ids of a buffer. Extending the newest one costs the new ids only; extending an older one
    copies it first, so that nobody's ids ever change."""

    def __init__(self) -> None:
        self._buffer = _Buffer(0)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> np.ndarray:
        """int32; not to be written to."""
        return self._buffer.array[: self._length]

    def extended(self, ids: np.ndarray) -> "TokenSequence":
        """This sequence followed by ``ids``."""
        buffer, end = self._buffer, self._length + len(ids)
        if self._length != buffer.used:
            buffer = _Buffer(2 * end)
            buffer.array[: self._length] = self.ids
        elif end > len(buffer.array):
            buffer.array = np.concatenate([self.ids, np.empty(2 * end - self._length, dtype=np.int32)])
        buffer.array[self._length : end] = ids
        buffer.used = end
        longer = TokenSequence.__new__(TokenSequence)
        longer._buffer, longer._length = buffer, end
        return longer


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading ids two sequences share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
