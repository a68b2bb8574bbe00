"""Prefect as the command line uses it: its server lives in the command's process and keeps the history."""

import signal
import socket
import sys

import pytest

from tests.flows.background import LIMIT_S, background
from tests.flows.commands import rollmill_process

SERVES = """
import sys, time
from pathlib import Path
from flows.cli.prefect import quiet

with quiet():
    from prefect.settings import PREFECT_API_URL
    Path(sys.argv[1]).write_text(PREFECT_API_URL.value())
    time.sleep(100)
"""

HISTORY = """
from flows.cli.prefect import quiet

with quiet():
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs():
            print("flow", run.state.type.value)
"""


@pytest.mark.slow
def test_no_server_outlives_a_command_that_was_killed(tmp_path):
    url = tmp_path / "url"
    with background([sys.executable, "-c", SERVES, str(url)], tmp_path / "log", {}, tmp_path) as running:
        running.wait_until(lambda: url.exists() and url.read_text().endswith("/api"))
        port = int(url.read_text().split(":")[2].partition("/")[0])
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        assert running.ended_by(signal.SIGKILL) == -9
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


@pytest.mark.slow
def test_the_history_says_how_a_command_ended_and_nothing_of_prefect_is_printed(tmp_path):
    env = {"PREFECT_HOME": str(tmp_path / "prefect")}
    words = ("stage", "tasks", "benchmark=arithmetic", "limit=5")
    done = rollmill_process(*words, "--store", str(tmp_path / "store"), env=env)
    assert done.code == 0, done.text
    assert done.err.strip() == ""
    with background([sys.executable, "-c", HISTORY], tmp_path / "log", env, tmp_path) as running:
        assert running.process.wait(LIMIT_S) == 0, running.output
        assert running.output == "flow COMPLETED\n"
