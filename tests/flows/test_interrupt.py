"""A command that is interrupted or killed ends at once, leaves no process behind, and can be given again."""

import signal
from pathlib import Path

import pytest

from tests.builders import stored_policy, stored_rollouts, stored_tasks
from tests.flows.background import background
from tests.flows.commands import command, rollmill

SLEEPY = '''
import time
from pathlib import Path

def sleepy(task, episode, *, flag):
    """Notes that it has begun, and works for an hour unless it was noted before."""
    flag = Path(flag)
    if not flag.exists():
        flag.touch()
        time.sleep(3600)
    return 1.0
'''


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.full),  # which nothing handles either
    ],
)
def test_a_command_whose_shards_are_at_work_ends_at_once_with_all_its_processes(store, prefect, tmp_path, number, code):
    tasks, policy = stored_tasks(store), stored_policy(store)
    rollouts = stored_rollouts(store, tasks, policy)
    grader, flag = tmp_path / "grader.py", tmp_path / "flag"
    grader.write_text(SLEEPY)
    words = ["stage", "rewards", f"rollouts={rollouts.ref}", f"grader={grader}:sleepy", f"params.flag={flag}"]
    words += ["timeout_s=3600", "execution.workers=1", "--store", store.url]
    with background(command(*words), tmp_path / "log", {}, tmp_path) as running:
        running.wait_until(flag.exists)
        assert len(running.left()) > 1, "it has grading workers"
        assert running.ended_by(number) == code  # which waits, but not for an hour
        assert ("the same command continues" in running.output) == (number == signal.SIGINT)
        assert "Traceback" not in running.output
    assert not list(Path(store.url).glob("artifacts/rewards/*/manifest.json"))
    done = rollmill(*words)
    assert done.code == 0, done.text
    assert "made rewards/" in done.out
