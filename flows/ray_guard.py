"""Ends what is left of a local Ray cluster once the process that started it is gone.

Ray's own processes notice that too, but its agents first report it to a server that is no more, for a minute or longer.
A program of its own (standard library only), so that it outlives a command that was killed. Nothing else may import it.

    ray_guard.py PARENT_ID      standard input: a pipe that the parent closes when it has ended the cluster itself
"""

import contextlib
import os
import select
import signal
import sys

_LOOK_S = 0.5


def main() -> None:
    parent_id = int(sys.argv[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    cluster: set[tuple[int, int]] = set()
    # The pipe closes with the parent, unless a process that the parent has forked holds it too: so both are watched.
    while os.getppid() == parent_id and not select.select([0], [], [], _LOOK_S)[0]:
        cluster = _cluster(parent_id) or cluster  # that of a parent who has just gone is not there any more
    for process_id, started in cluster:
        with contextlib.suppress(OSError, ProcessLookupError):
            if _look(process_id)[1] == started:  # and not another one that has the same id
                os.kill(process_id, signal.SIGKILL)


def _cluster(parent_id: int) -> set[tuple[int, int]]:
    """The ids and starts of Ray's processes: those that the parent has started, and all that these have."""
    children: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")) if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError):
            parent, started[int(name)] = _look(int(name))
            children.setdefault(parent, []).append(int(name))
    wave, found = [child for child in children.get(parent_id, []) if _is_ray(child)], set()
    while wave:
        found |= {(one, started[one]) for one in wave}
        wave = [child for one in wave for child in children.get(one, [])]
    return found


def _look(process_id: int) -> tuple[int, int]:
    """Its parent, and when it started (ticks since the machine did)."""
    with open(f"/proc/{process_id}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def _is_ray(process_id: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{process_id}/cmdline", "rb") as file:
        return b"/ray/" in file.read()
    return False


if __name__ == "__main__":
    main()
