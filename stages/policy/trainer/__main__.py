"""The trainer's process: waits for jobs, does them, answers. It ends when the pipeline's process ends.

Several processes run this same program: each has its own line to the pipeline and receives every job;
the one of rank 0 answers.
"""

import os
import queue
import threading
import time
import traceback
from typing import Any

from stages.policy.trainer.wire import PARENT_VARIABLE, Wire, connect_to_parent, is_alive


def main() -> None:
    wire = connect_to_parent()  # before the heavy imports, so that a parent that dies meanwhile is noticed
    rank = int(os.environ["RANK"])
    wire.send({"rank": rank, "pid": os.getpid()})
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(wire, jobs), daemon=True).start()
    try:
        from stages.policy.trainer.service import Service

        service = Service()
    except Exception as error:
        wire.send(_failure(error))
        raise
    while True:
        job = jobs.get()
        try:
            result = service.run(job, _progress_to(wire) if rank == 0 else _silent)
        except Exception as error:
            traceback.print_exc()
            wire.send(_failure(error))
        else:
            if rank == 0:
                wire.send({"result": result})


def _listen(wire: Wire, jobs: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Hands jobs on; ends this process at once when the pipeline is gone."""
    parent = int(os.environ[PARENT_VARIABLE])
    try:
        while is_alive(parent):
            message = wire.receive(timeout_s=2)
            if message is not None:
                jobs.put(message)
    except EOFError:
        pass
    os._exit(0)


def _failure(error: Exception) -> dict[str, Any]:
    hint = getattr(error, "hint", None)
    return {"error": {"kind": type(error).__name__, "message": getattr(error, "message", str(error)), "hint": hint}}


def _progress_to(wire: Wire) -> Any:
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > 0.2:
            last = time.monotonic()
            wire.send({"progress": [done, total]})

    return report


def _silent(done: int, total: int) -> None:
    """Only rank 0 reports."""


if __name__ == "__main__":
    main()
