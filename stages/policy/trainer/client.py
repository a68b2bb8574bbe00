"""The pipeline's side of the trainer: starts its processes, sends jobs, gives errors back as messages.

One trainer runs at a time in a process; it stays warm until another is needed or the process ends.
"""

import atexit
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas import errors
from schemas.errors import ConfigError, RollmillError, StageFailed
from stages.artifacts.temporary import TemporaryFolder
from stages.policy.settings import TrainerExecution
from stages.policy.trainer.wire import COLLECTIVES_VARIABLE, PARENT_VARIABLE, SOCKET_VARIABLE, Wire

MODULE = "stages.policy.trainer"
START_TIMEOUT_S = 300.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Launch:
    """What a trainer's processes are started with; another needs other processes."""

    processes: int
    threads: int
    device: str
    collectives: str

    @classmethod
    def of(cls, execution: TrainerExecution) -> "Launch":
        threads = execution.threads or max(1, (os.cpu_count() or 1) // execution.processes)
        return cls(execution.processes, threads, execution.device, execution.cpu_collectives)


class Trainer:
    """A started trainer."""

    def __init__(self, launch: Launch):
        _require_tools(launch)
        self.launch = launch
        self.holds: Any = None
        """What the last caller noted about the policy that it has in memory; None: it may have none."""
        self._lock = threading.Lock()
        self._wires: dict[int, Wire] = {}
        self._folder = TemporaryFolder("trainer")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder.path / "socket"))
        self._listener.listen(launch.processes)
        with open(self._folder.path / "log", "wb") as log:
            self._process = subprocess.Popen(
                _command(launch),
                env=_environment(launch, self._folder.path / "socket"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt from the keyboard is the pipeline's to handle
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def run(self, job: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Does a job and returns its result.

        Raises:
            RollmillError: what the trainer refused or failed at; one that died is told with the end of its log.
        """
        with self._lock:
            self.holds = None
            try:
                self._connect()
                for wire in self._wires.values():
                    wire.send(job)
                return self._answer(progress)
            except (EOFError, OSError):
                raise self._died() from None
            except BaseException as error:
                # interrupted, it is in the middle of the job; one process that failed leaves the others waiting
                if not isinstance(error, RollmillError) or self.launch.processes > 1:
                    self.close()
                raise

    def close(self) -> None:
        """Ends the processes."""
        for wire in self._wires.values():
            wire.close()
        self._listener.close()
        try:
            self._process.wait(timeout=10 if self._wires else 0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.remove()

    def _connect(self) -> None:
        """Waits until every process has reported."""
        deadline = time.monotonic() + START_TIMEOUT_S
        self._listener.settimeout(0.2)
        while len(self._wires) < self.launch.processes:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if not self.is_running or time.monotonic() > deadline:
                    raise EOFError("the trainer did not start") from None
                continue
            connection.setblocking(True)
            wire = Wire(connection)
            hello = wire.receive()
            assert hello is not None
            self._wires[hello["rank"]] = wire

    def _answer(self, progress: Progress) -> dict[str, Any]:
        while True:
            ready, _, _ = select.select(list(self._wires.values()), [], [])
            for wire in ready:
                while (message := wire.receive(timeout_s=0)) is not None:
                    if "error" in message:
                        raise self._told(**message["error"])
                    if "result" in message:
                        result: dict[str, Any] = message["result"]
                        return result
                    progress(*message["progress"])

    def _told(self, kind: str, message: str, hint: str | None) -> RollmillError:
        """An error in the trainer as one here; what is not made for people comes with the end of the log."""
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, RollmillError):
            error: RollmillError = known(message, hint=hint)
            return error
        return StageFailed(f"the trainer failed: {kind}: {message}", hint=self._log_tail())

    def _died(self) -> StageFailed:
        tail = self._log_tail()
        self.close()
        code = self._process.returncode
        return StageFailed(f"the trainer's process ended by itself (exit code {code})", hint=tail)

    def _log_tail(self, lines: int = 30) -> str:
        text = (self._folder.path / "log").read_text(errors="replace")
        return "the end of its log:\n  " + "\n  ".join(text.splitlines()[-lines:])


_current: tuple[int, Trainer] | None = None
"""The trainer of this process, with the process's id: a forked child must not use its parent's."""
_guard = threading.Lock()


def trainer_for(execution: TrainerExecution) -> Trainer:
    """The running trainer, or a new one where none runs that was started so."""
    global _current
    launch = Launch.of(execution)
    with _guard:
        if _current is not None and _current[0] == os.getpid():
            trainer = _current[1]
            if trainer.is_running and trainer.launch == launch:
                return trainer
            trainer.close()
        _current = (os.getpid(), Trainer(launch))
        return _current[1]


def stop() -> None:
    """Ends this process's trainer, if there is one."""
    global _current
    with _guard:
        if _current is not None and _current[0] == os.getpid():
            _current[1].close()
        _current = None


atexit.register(stop)


def _require_tools(launch: Launch) -> None:
    if launch.processes == 1 or launch.collectives == "gloo":
        return
    compiler = os.environ.get("CXX", "c++")
    missing = [tool for tool in (compiler, "ninja") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"execution.cpu_collectives=shm with {launch.processes} processes: DeepSpeed compiles an operation "
            f"for it, and {' and '.join(missing)} cannot be found",
            hint="install a C++ compiler and ninja, or set execution.cpu_collectives=gloo, which needs neither",
        )


def _command(launch: Launch) -> list[str]:
    if launch.processes == 1:
        return [sys.executable, "-m", MODULE]
    several = ["--num_nodes", "1", "--num_gpus", str(launch.processes), "--master_port", str(_free_port())]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *several, "--no_local_rank", "--module", MODULE]


def _environment(launch: Launch, socket_file: Path) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[3])
    given = dict(os.environ)
    # threads that wait do not spin: measured with busy processors, spinning made a step 25 times slower
    given.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [given.get("PYTHONPATH")])])
    given |= {
        SOCKET_VARIABLE: str(socket_file),
        PARENT_VARIABLE: str(os.getpid()),
        COLLECTIVES_VARIABLE: launch.collectives if launch.processes > 1 else "gloo",
        "OMP_NUM_THREADS": str(launch.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if launch.processes == 1:
        given |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if launch.device == "cpu":
        given |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return given


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
