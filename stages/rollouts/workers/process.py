"""Commands as child processes whose end is certain, with that of all that they start; and servers, with their log."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_KILL_S = 10.0
"""How long the guard may take to kill what did not end within its grace."""
_LOG_READ = 4_000_000
"""Bytes at the end of a log that are looked at."""
_ERROR = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .{1,400})", re.MULTILINE)


def guarded(command: Sequence[str], grace_s: float, *, has_pipe: bool) -> list[str]:
    """A command under a guard (``guard.py``), which ends it and all that it has started: once it has ended itself, on
    SIGTERM, and when this process is gone, however that one ends.

    Args:
        grace_s: between asking and killing.
        has_pipe: standard input is a pipe, whose end is the command's, too; else the command gets it.
    """
    return [
        *(sys.executable, "-I", "-S", str(_GUARD), "pipe" if has_pipe else "pass", str(os.getpid()), str(grace_s)),
        *command,
    ]


def how_ended(status: int) -> str:
    """A guarded command's exit status in words."""
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(status - 128).name}"
    return f"has ended with status {status}"


def end_guarded(guard: "subprocess.Popen[bytes] | asyncio.subprocess.Process") -> None:
    """Asks a guard to kill its command. Returns at once."""
    with contextlib.suppress(ProcessLookupError):
        guard.send_signal(signal.SIGTERM)


class ServerProcess:
    """A running command. It ends with ``close``, and with this process however that one ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_file: Path, grace_s: float):
        self.log_file = log_file
        self._grace_s = grace_s
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                guarded(command, grace_s, has_pipe=True),
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt from the keyboard is the pipeline's to handle
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._guard.poll()

    def log_tail(self, lines: int = 30) -> str:
        """The end of what it has written since it started."""
        return "\n  ".join(self._log().splitlines()[-lines:])

    def log_errors(self, most: int = 3) -> list[str]:
        """The errors that it has written, the first of them first: what ends a server is seldom what it says last."""
        return list(dict.fromkeys(_ERROR.findall(self._log())))[:most]

    def _log(self) -> str:
        with contextlib.suppress(OSError), self.log_file.open("rb") as log:
            log.seek(max(self._log_start, self.log_file.stat().st_size - _LOG_READ))
            return log.read().decode(errors="replace")
        return ""

    def close(self) -> None:
        """Ends it, with all processes that it has started; a second call does nothing."""
        self.ask_to_end()
        try:
            self._guard.wait(self._grace_s + _KILL_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()

    def ask_to_end(self) -> None:
        """Begins what ``close`` waits for."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
