"""Looks at real processes and ports, for tests of what must end."""

import socket
import time
from collections.abc import Callable
from pathlib import Path


def is_running(process_id: int) -> bool:
    """Whether it exists and is no zombie."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def name_of(process_id: int) -> str:
    """The command that it runs; empty where it has ended."""
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(root: int) -> list[int]:
    """All living descendants of a process."""
    found, wave = [], [root]
    while wave:
        wave = [child for one in wave for child in _children(one)]
        found += wave
    return [one for one in found if is_running(one)]


def _children(process_id: int) -> list[int]:
    found: list[int] = []
    for tasks in Path(f"/proc/{process_id}/task").glob("*/children"):
        found += map(int, tasks.read_text().split())
    return found


def eventually(what: Callable[[], bool], within_s: float = 60) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + within_s
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of the loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
