"""Prefect as the command line uses it: its server lives in the command's process and keeps the history."""

import signal
import socket
import sqlite3
import sys
from contextlib import closing

import pytest

from tests.flows.background import background
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
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as history:
        assert history.execute("SELECT state_type FROM flow_run").fetchall() == [("COMPLETED",)]
