"""Runs a command and ends it, with every process that it started, as soon as the pipeline's process is gone.

A program of its own (standard library only): it outlives a pipeline that was killed, just long enough
to clean up after it. Nothing else may import it.

    guard.py PARENT_ID GRACE_S COMMAND …      standard input: a pipe that the parent holds open
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_LOOK_S = 0.25
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    parent_id, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes whose parent has died become ours
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_the_guard)
    # The pipe closes with the parent, unless a process that the parent has forked holds it too: so both are watched.
    while child.poll() is None and not asked and os.getppid() == parent_id:
        if select.select([0], [], [], _LOOK_S)[0]:
            break
    _end(child, grace_s)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Asks the command to end, and after ``grace_s`` kills what is left of it."""
    deadline = time.monotonic() + grace_s
    if child.poll() is None:
        _signal(child.pid, signal.SIGTERM)
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    while _reap(child) and time.monotonic() < deadline:  # its own processes end with it, or do not
        time.sleep(0.05)
    while _reap(child):
        for process_id in _descendants(os.getpid()):
            _signal(process_id, signal.SIGKILL)
        time.sleep(0.02)


def _reap(child: "subprocess.Popen[bytes]") -> bool:
    """Takes in what has ended; whether anything is left."""
    if child.poll() is None:
        return True
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")) if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, next_ones = [], [root]
    while next_ones:
        next_ones = [child for one in next_ones for child in children.get(one, [])]
        found += next_ones
    return found


def _signal(process_id: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, number)
        os.kill(process_id, signal.SIGCONT)  # a stopped process takes no other signal than a kill


def _die_with_the_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
