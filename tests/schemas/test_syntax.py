"""Syntax is read in many threads at once."""

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from schemas.syntax import parsed_expression, parsed_module


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns in the middle of whatever makes objects."""
    before = gc.get_threshold()

    def switch(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    gc.callbacks.append(switch)
    gc.set_threshold(20)
    yield
    gc.callbacks.remove(switch)
    gc.set_threshold(*before)


def test_threads_do_not_disturb_each_other(switching: None) -> None:
    source = "def one(a):\n    return [a + 1, {2: (3, [4, 5])}]\n" * 20
    gate = threading.Barrier(4)

    def read(number: int) -> int:
        gate.wait()
        for _ in range(20):
            parsed_expression("(1 + 2) * [3, [4, [5]]][0]")
            module = parsed_module(source.encode(), "file.py")
        return len(module.body)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, range(4))) == [20] * 4
