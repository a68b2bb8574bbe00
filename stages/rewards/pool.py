"""Warm pools of grading workers, and how a list of items gets graded by one.

Items travel in chunks for throughput. Where a chunk's worker dies, its items are graded again one by
one, so exactly the guilty item is marked and the others are graded as usual.
"""

import atexit
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from schemas.errors import InputError, StageFailed
from stages.rewards import worker
from stages.rewards.outcome import Outcome
from stages.rewards.worker import Item, WorkerSettings

_CHUNKS_PER_WORKER = 500
"""After this many a worker is replaced: graders leak, and symbolic mathematics caches."""
_SPARE_POOLS = 2
"""Pools that may stay open unused."""


@dataclass
class _Shared:
    pool: ProcessPool
    users: int = 0


_shared: dict[tuple[WorkerSettings, int], _Shared] = {}
_lock = threading.Lock()


@contextmanager
def grading_pool(settings: WorkerSettings, n_workers: int) -> Iterator[ProcessPool]:
    """A pool whose workers have loaded these graders. It stays open for the next shard or iteration.

    Raises:
        InputError: a grader cannot be loaded.
        StageFailed: the workers cannot start, or the pool broke while it was used.
    """
    key = (settings, n_workers)
    with _lock:
        if key not in _shared:
            pool = ProcessPool(
                n_workers,
                max_tasks=_CHUNKS_PER_WORKER,
                initializer=worker.start,
                initargs=(settings,),
                context=get_context("spawn"),
            )
            _shared[key] = _Shared(pool)
        shared = _shared[key]
        shared.users += 1
    try:
        fault = _scheduled(shared.pool, worker.load_fault).result()
        if fault is not None:
            raise InputError(f"grader {', '.join(settings.graders)} cannot be loaded: {fault}")
        yield shared.pool
    except BrokenProcessPool as error:
        with _lock:
            _shared.pop(key, None)
        _close(shared.pool)
        raise StageFailed(
            f"the grading workers stopped: {error}",
            hint="a script that starts Rollmill needs an `if __name__ == '__main__':` around its calls; "
            f"memory for each worker is limited to {settings.memory_mb} MiB (rewards.memory_mb)",
        ) from error
    finally:
        with _lock:
            shared.users -= 1
            unused = [k for k, other in _shared.items() if other.users == 0 and k != key]
            closing = [_shared.pop(k).pool for k in unused[: max(0, len(unused) - _SPARE_POOLS + 1)]]
        for pool in closing:
            _close(pool)


def graded(
    pool: ProcessPool, items: Sequence[Item], *, timeout_s: float, chunk_size: int
) -> Iterator[tuple[Item, list[Outcome]]]:
    """The items with their outcomes, in order within a chunk; those of a chunk whose worker died come last."""
    chunks = [items[start : start + chunk_size] for start in range(0, len(items), chunk_size)]
    suspects: list[Item] = []
    for chunk, result in zip(chunks, _results(pool, chunks, timeout_s, alone=False), strict=True):
        if isinstance(result, Outcome):
            suspects += chunk
        else:
            yield from zip(chunk, result, strict=True)
    while suspects:
        again: list[Item] = []
        singles = [[item] for item in suspects]
        for (item,), result in zip(singles, _results(pool, singles, timeout_s, alone=True), strict=True):
            if not isinstance(result, Outcome):
                yield item, result[0]
            elif len(item.trajectories) > 1:
                again += [replace(item, trajectories=(name,)) for name in item.trajectories]
            else:
                yield item, [replace(result, trajectory=name) for name in item.trajectories]
        suspects = again


def _results(
    pool: ProcessPool, chunks: Sequence[Sequence[Item]], timeout_s: float, *, alone: bool
) -> Iterator[list[list[Outcome]] | Outcome]:
    """Each chunk's outcomes, or one outcome without names that says how the chunk's worker died."""
    grace_s = 0.5 + 0.1 * timeout_s
    futures = []
    for chunk in chunks:
        n_calls = sum(len(item.trajectories) for item in chunk)
        # Alone, the pool's own kill must come before the worker's: only then is it known to be a timeout.
        pool_limit_s = n_calls * (timeout_s + grace_s) + (0 if alone else 5)
        worker_limit_s = timeout_s + grace_s * (4 if alone else 1) + (5 if alone else 0)
        args: tuple[Any, ...] = (list(chunk), timeout_s, worker_limit_s)
        futures.append(_scheduled(pool, worker.grade_chunk, args, pool_limit_s))
    for future in futures:
        try:
            yield future.result()
        except TimeoutError:
            yield Outcome("", "timeout", explanation=f"the grader took longer than {timeout_s:g} s and was killed")
        except ProcessExpired as error:
            yield Outcome("", "error", explanation=_death(error.exitcode))


def _scheduled(
    pool: ProcessPool, function: Callable[..., Any], args: tuple[Any, ...] = (), limit_s: float | None = None
) -> "ProcessFuture[Any]":
    try:
        return pool.schedule(function, args=args, timeout=limit_s)
    except RuntimeError as error:  # what pebble raises once its workers cannot be started
        raise BrokenProcessPool(str(error)) from error


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"the grader's process died: {signal.Signals(-exitcode).name}"
    return f"the grader's process exited with code {exitcode}"


def _close(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


@atexit.register
def _close_all() -> None:
    for shared in list(_shared.values()):  # at an interrupt shards may still be at work
        _close(shared.pool)
    _shared.clear()
