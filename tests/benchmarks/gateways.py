"""Starts what the gateway's benchmark measures, each in a process of its own: a server that answers at once, our
gateway, and ``rllm-model-gateway``, which gets an environment of its own on first use."""

import json
import os
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.rollouts.workers.ports import hold_port

THEIRS = "rllm-model-gateway==0.1.0"
_THEIR_FOLDER = Path("build/rllm-model-gateway")
_HERE = Path(__file__).parent


@dataclass
class Process:
    """One that tells what it has as a line of JSON, and ends with its input."""

    process: "subprocess.Popen[str]"
    told: dict[str, Any]

    def resident_mib(self) -> float:
        """Memory that it holds now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def ended(self) -> dict[str, Any]:
        """What it tells at its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@contextmanager
def started(command: list[str], asked: dict[str, Any], **environment: str) -> Iterator[Process]:
    """A Python program of ours."""
    with subprocess.Popen(
        [sys.executable, *command, json.dumps(asked)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment,
    ) as process:  # fmt: skip
        try:
            one = Process(process, {})
            one.told = one._line()
            yield one
        finally:
            process.kill()


@contextmanager
def upstream(ids: list[int], texts: list[str], logprob: float) -> Iterator[int]:
    """The server that answers at once; its port."""
    asked = {"ids": ids, "texts": texts, "logprob": logprob}
    with started([str(_HERE / "null_upstream.py")], asked) as one:
        yield int(one.told["port"])


@contextmanager
def our_gateway(folder: Path, **asked: Any) -> Iterator[Process]:
    """Rollmill's, with its journal in ``folder``; see ``our_gateway.py``."""
    with started(["-m", "tests.benchmarks.our_gateway"], asked, ROLLMILL_CACHE=str(folder)) as one:
        yield one


class TheirGateway:
    """``rllm-model-gateway``, as its command starts it."""

    def __init__(self, port: int, database: Path):
        self.port = port
        self._database = database

    def n_stored(self) -> int:
        """Calls in its database."""
        with sqlite3.connect(self._database) as connection:
            return int(connection.execute("select count(*) from traces").fetchone()[0])


@contextmanager
def their_gateway(folder: Path, upstream_port: int) -> Iterator[TheirGateway]:
    """``rllm-model-gateway`` with its database in ``folder``; it has stored a call before it answers it."""
    held, database, config = hold_port(None), folder / "theirs.db", folder / "theirs.yaml"
    config.write_text(json.dumps({"sync_traces": True}), encoding="utf-8")
    arguments = {
        "--host": "127.0.0.1", "--port": str(held.number), "--worker": f"http://127.0.0.1:{upstream_port}/v1",
        "--db-path": str(database), "--store": "sqlite", "--config": str(config), "--log-level": "WARNING",
    }  # fmt: skip
    words = [word for pair in arguments.items() for word in pair]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        with subprocess.Popen([_their_python(), "-m", "rllm_model_gateway", *words], env=environment) as process:
            try:
                _wait_for(f"http://127.0.0.1:{held.number}/health")
                yield TheirGateway(held.number, database)
            finally:
                process.kill()
    finally:
        held.release()


def _their_python() -> str:
    python = _THEIR_FOLDER / "bin/python"
    marker = _THEIR_FOLDER / THEIRS
    if not marker.exists():
        venv.create(_THEIR_FOLDER, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", THEIRS], check=True)
        marker.touch()
    return str(python)


def _wait_for(url: str) -> None:
    for _ in range(300):
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")
