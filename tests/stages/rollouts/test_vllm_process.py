"""A server's process and all that it has started end with it, and with the pipeline, however that one ends."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from stages.rollouts.workers.ports import HeldPort, hold_port
from stages.rollouts.workers.process import ServerProcess
from tests.stages.rollouts.processes import descendants, eventually, is_free, is_running

SERVER = """
    import os, signal, socket, subprocess, sys, time
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    listener.listen()
    helper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    one = subprocess.Popen([sys.executable, "-c", helper])
    far = subprocess.Popen([sys.executable, "-c", helper], start_new_session=True)
    if os.fork() == 0:  # a daemon: its parent ends at once
        os.setsid()
        if os.fork() == 0:
            os.write(1, f"daemon {os.getpid()}\\n".encode())  # whole, though others write there, too
            time.sleep(600)
        os._exit(0)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, f"ready {os.getpid()} {one.pid} {far.pid}\\n".encode())
    time.sleep(600 if "dies" not in sys.argv else 0.5)
    print("the last words", flush=True)
    sys.exit(7)
"""
"""A server with helpers in every way in which a process can slip away."""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(textwrap.dedent(SERVER))
    return path


@pytest.fixture
def start(tmp_path, script):
    started = []

    def start(*words, grace_s=1.0):
        port = hold_port(None)
        command = [sys.executable, str(script), str(port.number), *words]
        process = ServerProcess(command, os.environ, tmp_path / "logs" / "server.log", grace_s)
        started.append(process)
        assert eventually(lambda: "ready" in process.log_tail() and "daemon" in process.log_tail())
        return process, port.number, _ids(process.log_tail())

    yield start
    for process in started:
        process.close()


def _ids(log):
    return [int(word) for line in log.splitlines() for word in line.split()[1:] if word.isdigit()]


@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
def test_close_ends_the_server_and_every_process_of_it(start, manner):
    process, port, ids = start(manner)
    assert len(ids) == 4
    assert all(map(is_running, ids))
    assert not is_free(port)
    process.close()
    assert not any(map(is_running, ids))
    assert is_free(port)
    assert process.exit_code is not None
    process.close()


def test_a_stopped_server_ends_too(start):
    process, _, ids = start("obedient")
    for process_id in ids:
        os.kill(process_id, signal.SIGSTOP)
    process.close()
    assert not any(map(is_running, ids))


def test_what_a_dead_server_leaves_is_ended_and_its_exit_code_and_last_words_are_known(start):
    process, port, ids = start("dies")
    assert eventually(lambda: process.exit_code is not None)
    assert process.exit_code == 7
    assert process.log_tail(1) == "the last words"
    assert not any(map(is_running, ids))
    assert is_free(port)


def test_the_first_error_in_a_log_is_told_however_much_follows(tmp_path):
    words = """
print("(Worker pid=7) ERROR 05:43 [x.py:1] ValueError: Available memory is less than that")
print("\\n".join(f"  File {n}" for n in range(100)))
print("RuntimeError: it failed. See root cause above")
print("ValueError: Available memory is less than that")
"""
    process = ServerProcess([sys.executable, "-c", words], os.environ, tmp_path / "log", 1.0)
    assert eventually(lambda: process.exit_code is not None)
    assert process.log_errors() == [
        "ValueError: Available memory is less than that",
        "RuntimeError: it failed. See root cause above",
    ]
    process.close()


def test_a_killed_server_says_by_which_signal(start):
    process, _, ids = start("obedient")
    server = min(ids)
    os.kill(server, signal.SIGKILL)
    assert eventually(lambda: process.exit_code is not None)
    assert process.exit_code == 128 + signal.SIGKILL
    assert not any(map(is_running, ids))


PIPELINE = """
    import os, sys, time
    from pathlib import Path
    from stages.rollouts.workers.process import ServerProcess
    script, log, how = sys.argv[1:]
    process = ServerProcess([sys.executable, script, "0"], os.environ, Path(log), 1.0)
    while "ready" not in process.log_tail() or "daemon" not in process.log_tail():
        time.sleep(0.05)
    if how == "forked" and os.fork() == 0:
        time.sleep(600)  # keeps a copy of the pipe to the guard
    print("up", flush=True)
    if how == "thread":
        sys.exit()
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "forked", "thread"])
def test_the_server_ends_with_the_pipeline_however_that_one_ends(tmp_path, script, how):
    log = tmp_path / "log"
    pipeline = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PIPELINE), str(script), str(log), how],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert pipeline.stdout is not None
    assert pipeline.stdout.readline() == "up\n"
    ids = _ids(log.read_text())
    family = descendants(pipeline.pid)
    assert set(ids) <= set(family)
    if how != "thread":
        os.kill(pipeline.pid, getattr(signal, how, signal.SIGKILL))
    pipeline.wait(60)
    assert eventually(lambda: not any(map(is_running, ids)))
    os.killpg(pipeline.pid, signal.SIGKILL) if how == "forked" else None
    assert eventually(lambda: not any(map(is_running, family)))


def test_a_port_that_is_held_is_given_to_nobody_else():
    port = hold_port(None)
    next_one = hold_port(port.number)
    assert next_one.number > port.number
    next_one.release()
    with pytest.raises(OSError, match="in use"):
        HeldPort(port.number)
    number = port.number
    port.release()
    again = HeldPort(number)
    assert again.number == number
    again.release()


def test_a_port_on_which_somebody_listens_is_passed_over():
    import socket

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        found = hold_port(taken)
        assert found.number > taken
        found.release()
