"""Programs that run beside a test and are ended with everything that they started, also when the test fails."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.flows.one_stage import MARK, processes_with
from tests.stages.rollouts.processes import name_of

LIMIT_S = 300.0
"""That nothing here needs, also on a machine that is busy with other things; a test that needs it fails."""
LEFT_S = 45.0
"""For what a program has started to end after it; Ray's processes, which nobody ends, take more than a minute."""


class Background:
    """A program that runs, and its output so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, mark: str):
        self.process = process
        self._log = log
        self._mark = mark

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def left(self) -> list[int]:
        """Processes that are still there, of the program and of those that it started."""
        return processes_with(self._mark)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        """Waits; a program that ends meanwhile, or is not ready in time, fails the test with its output."""
        end = time.monotonic() + timeout_s
        while not ready():
            assert self.process.poll() is None, f"it ended with code {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < end, f"it is not ready after {timeout_s} s:\n{self.output}"
            time.sleep(0.05)

    def ended_by(self, number: signal.Signals, timeout_s: float = LIMIT_S) -> int:
        """Sends the signal and returns the exit code; nothing that it started may be left soon after."""
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Waits for its end and returns the exit code; nothing that it started may be left soon after."""
        code = self.process.wait(timeout_s)
        end = time.monotonic() + LEFT_S
        while left := self.left():
            assert time.monotonic() < end, f"{[name_of(one) for one in left]} outlive it"
            time.sleep(0.05)
        return code


@contextmanager
def background(command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path) -> Iterator[Background]:
    """Starts a program in a session of its own."""
    mark = secrets.token_hex(8)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env, MARK: mark},
            cwd=cwd,
            start_new_session=True,
        )
    try:
        yield Background(process, log, mark)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for left in {process.pid, *processes_with(mark)}:
            if process.returncode is None or left != process.pid:
                with suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
        process.wait()
