"""Runs Python code that nobody trusts, in a process of its own, and gives back what it printed.

The process has no environment, an empty folder that is deleted after it, and limits on time, memory, processes and
output. Where the kernel allows it (Linux with user namespaces and Landlock) it has no network, and no file but the
standard library. An audit hook refuses the same on every system, but is no wall: clever code gets around it.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from schemas.config import ConfigModel
from stages.artifacts.temporary import TemporaryFolder

_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE_S = 10.0
"""Wall time beyond the limit, for the start of the process on a busy machine; the process's own alarm comes before."""


class SandboxLimits(ConfigModel):
    """What one run may use."""

    time_s: float = Field(default=5.0, gt=0, le=600)
    """Wall time, seconds."""
    memory_mb: int = Field(default=512, ge=64, le=65_536)
    """Address space, MiB."""
    output_chars: int = Field(default=2000, ge=1, le=1_000_000)
    """Characters of the output that are kept. Files that the code writes may each be four times as many bytes long, and
    64 KiB at least."""


@dataclass(frozen=True)
class Ran:
    """What came of a run."""

    output: str
    """What the code printed, and its exception's last line; cut at the limit."""
    status: str
    """ok, error (it raised), timeout, or killed (by a limit or a signal)."""


def run_python(code: str, limits: SandboxLimits) -> Ran:
    """Runs ``code`` as a program. Blocks until it has ended or its time is up."""
    with TemporaryFolder("sandbox") as scratch:
        folder, printed = scratch / "work", scratch / "output"
        folder.mkdir()
        with open(printed, "wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(_CHILD), str(limits.memory_mb), str(limits.time_s),
                 str(max(65_536, 4 * limits.output_chars))],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env={},
                start_new_session=True,
            )  # fmt: skip
            try:
                child.communicate(code.encode("utf-8", "replace"), timeout=limits.time_s + _GRACE_S)
                status = {0: "ok", 1: "error"}.get(child.returncode, "killed")
                if child.returncode == -signal.SIGALRM:
                    status = "timeout"
            except subprocess.TimeoutExpired:
                status = "timeout"
            finally:
                _end(child)
        with open(printed, "rb") as found:
            text = found.read(4 * limits.output_chars + 4).decode("utf-8", "replace")
    return Ran(text if len(text) <= limits.output_chars else text[: limits.output_chars] + "…", status)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ends the process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
