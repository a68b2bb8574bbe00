"""The command line as tests use it: in this process where speed matters, as a process of its own where that does."""

import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROLLMILL = Path(sys.executable).with_name("rollmill")
WIDE = {"COLUMNS": "300"}
"""Tables are laid out for the terminal's width; in a narrow one names are broken over lines."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def rollmill(*arguments: str | Path) -> Done:
    """Runs ``rollmill`` in this process, from the entry point that the console script calls."""
    from flows.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", ["rollmill", *map(str, arguments)]),
        patch.dict(os.environ, WIDE),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Done(code, out.getvalue(), err.getvalue())


def rollmill_process(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 120
) -> Done:
    """Runs the installed console script to its end."""
    done = subprocess.run(
        command(*arguments),
        cwd=cwd,
        env={**os.environ, **WIDE, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def command(*arguments: str | Path) -> Sequence[str]:
    """The words that start the console script."""
    return [str(ROLLMILL), *map(str, arguments)]


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below ``folder``; empty where there is no such folder."""
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
