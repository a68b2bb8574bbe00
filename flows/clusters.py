"""Where Prefect's tasks run: in threads of this process, or in the processes of a Ray or Dask cluster."""

import asyncio
import concurrent.futures
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from prefect import Task
from prefect.futures import PrefectFuture, PrefectWrappedFuture
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from schemas.errors import StageFailed
from schemas.runner import RunnerConfig

Futures = Mapping[str, PrefectFuture[Any]]
"""Of tasks, by name."""
_RAY_GUARD = Path(__file__).with_name("ray_guard.py")


class Cluster(ABC):
    """A task runner that has started."""

    is_elsewhere = True
    """Whether its tasks run in other processes than this one."""

    def __init__(self, runner: TaskRunner[Any], deaths: tuple[type[Exception], ...] = ()):
        self._deaths = deaths
        self._stack = ExitStack()
        self._runner = self._stack.enter_context(runner)

    def submit(self, task: "Task[..., Any]", parameters: dict[str, Any]) -> PrefectFuture[Any]:
        return self._runner.submit(task, parameters=parameters)

    def result(self, future: PrefectFuture[Any]) -> None:
        """Raises what its task raised.

        Raises:
            StageFailed: the process of the task died, at each try.
        """
        try:
            future.result()
        except self._deaths as death:
            raise StageFailed(
                f"a process of the cluster has died over a shard, again and again: {death}",
                hint="finished shards are kept; the same command goes on from there",
            ) from death

    @abstractmethod
    def wait(self, futures: Futures, timeout_s: float) -> set[str]:
        """Waits until a task has ended, well or not, or for ``timeout_s``; returns the names of those that have."""

    def abandon(self, futures: Futures) -> None:
        """Ends it without waiting for tasks at work, where that can be done."""
        self.close()

    def close(self) -> None:
        """Ends it, and the cluster if it was started here; a second call does nothing."""
        self._stack.close()


class Threads(Cluster):
    """Of this process, for one stage."""

    is_elsewhere = False

    def __init__(self, count: int):
        super().__init__(ThreadPoolTaskRunner(max_workers=count))

    def wait(self, futures: Futures, timeout_s: float) -> set[str]:
        names = _wrapped(futures)
        ended, _ = concurrent.futures.wait(names, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)
        return {names[future] for future in ended}

    def abandon(self, futures: Futures) -> None:
        for future in _wrapped(futures):
            future.cancel()
        self._stack.pop_all()  # the runner would wait for the shards at work


class RayCluster(Cluster):
    """Ray tries a task again, in another process, where one has died."""

    def __init__(self, config: RunnerConfig):
        import ray
        from prefect_ray import RayTaskRunner

        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        own = {"num_cpus": config.workers, "include_dashboard": False}
        # "local" starts one; without a word Ray would go to one that somebody has started on this machine.
        started = RayTaskRunner(address="local", init_kwargs=quiet | own)
        runner = RayTaskRunner(address=config.address, init_kwargs=quiet) if config.address else started
        super().__init__(runner, (ray.exceptions.RayError,))
        self._ray = ray
        self._guard = None if config.address else _guard()

    def wait(self, futures: Futures, timeout_s: float) -> set[str]:
        names = _wrapped(futures)
        ended, _ = self._ray.wait(list(names), timeout=timeout_s)
        return {names[future] for future in ended}

    def close(self) -> None:
        super().close()
        if self._guard is not None:
            self._guard.communicate()  # closes its pipe
            self._guard = None


class DaskCluster(Cluster):
    """Dask tries a task again, in another process, where one has died."""

    def __init__(self, config: RunnerConfig):
        os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "critical")  # for the workers
        from distributed import KilledWorker
        from prefect_dask import DaskTaskRunner

        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # here it may have been imported before

        if config.address is not None:
            _greet(config.address, config.connect_s)

        own = {
            "n_workers": config.workers, "threads_per_worker": 1, "processes": True,
            "dashboard_address": "127.0.0.1:0",  # a port that no other cluster has taken
            "silence_logs": logging.CRITICAL,
        }  # fmt: skip
        runner = DaskTaskRunner(address=config.address) if config.address else DaskTaskRunner(cluster_kwargs=own)
        super().__init__(runner, (KilledWorker,))
        with _interrupts_ignored():  # one from the keyboard is this process's to handle
            self._client = runner.client  # connects, or starts the cluster
        self._is_given = config.address is not None

    def wait(self, futures: Futures, timeout_s: float) -> set[str]:
        time.sleep(timeout_s)
        return {name for future, name in _wrapped(futures).items() if future.done()}

    def close(self) -> None:
        if self._is_given:
            self._is_given = False
            self._client.run(_end_engines, on_error="ignore")  # its processes go on, and what they hold would, too
        super().close()


def _wrapped(futures: Futures) -> dict[Any, str]:
    """Names by what the cluster itself knows the tasks by."""
    return {cast("PrefectWrappedFuture[Any, Any]", future).wrapped_future: name for name, future in futures.items()}


def _guard() -> "subprocess.Popen[bytes]":
    """What ends a cluster that outlives this process."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_RAY_GUARD), str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,  # an interrupt from the keyboard is this process's to handle
    )


def _greet(address: str, timeout_s: float) -> None:
    """Raises where no Dask cluster with processes is there; a client that fails to connect would never end."""
    from distributed import rpc

    async def workers() -> int:
        async with rpc(address) as scheduler:
            return len((await scheduler.identity())["workers"])

    try:
        count = asyncio.run(asyncio.wait_for(workers(), timeout_s))
    except TimeoutError:
        raise StageFailed(f"what listens there has not answered as a Dask cluster within {timeout_s:g} s") from None
    if not count:
        raise StageFailed("it has no processes that work", hint="start some with `dask worker`")


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """By the processes that are started meanwhile; only the main thread can arrange it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_engines() -> None:
    from stages.rollouts.engines import close_engines

    close_engines()


def start_cluster(config: RunnerConfig) -> Cluster:
    """The Ray or Dask cluster of the settings.

    Raises:
        StageFailed: it does not start, or cannot be reached.
    """
    try:
        return RayCluster(config) if config.type == "ray" else DaskCluster(config)
    except Exception as error:
        where = f"at {config.address} cannot be used" if config.address else "does not start"
        raise StageFailed(f"the {config.type} cluster {where}: {error}") from error
