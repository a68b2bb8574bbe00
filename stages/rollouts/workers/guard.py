"""Runs a command and ends it, with every process that it started, as soon as the pipeline's process is gone.

A program of its own (standard library only): it outlives a pipeline that was killed, just long enough
to clean up after it. Nothing else may import it.

    guard.py pipe PARENT_ID GRACE_S COMMAND …      standard input: a pipe that the parent holds open
    guard.py pass PARENT_ID GRACE_S COMMAND …      standard input, and other open files, are the command's

It ends as the command does; with 128 and the signal's number where that was ended by a signal.
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
    has_pipe, parent_id, grace_s, command = sys.argv[1] == "pipe", int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes whose parent has died become ours
    asked: list[int] = []
    news = _signalled()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if has_pipe else None,
            start_new_session=True,
            close_fds=has_pipe,
            preexec_fn=_die_with_the_guard,
        )
    except OSError as error:
        print(f"cannot be started: {error}", file=sys.stderr)
        return 127
    if not has_pipe:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # who writes to the command learns that it has stopped reading
    watched = [0, news] if has_pipe else [news]
    # The pipe closes with the parent, unless a process that the parent has forked holds it too: so both are watched.
    while child.poll() is None and not asked and os.getppid() == parent_id:
        ready = select.select(watched, [], [], _LOOK_S)[0]
        if 0 in ready:
            break
        if news in ready:
            os.read(news, 4096)
    _end(child, grace_s)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _signalled() -> int:
    """Can be read from as soon as a signal has come, the end of a child's process among them."""
    here, there = os.pipe()
    os.set_blocking(there, False)
    signal.set_wakeup_fd(there, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return here


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
