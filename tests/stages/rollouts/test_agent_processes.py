"""Agents in processes of their own, and programs as agents: what is recorded, and what is left of them."""

import json
import os
import sys
import time
from pathlib import Path
from secrets import token_hex

import pytest

from schemas.errors import NotFoundError
from stages.artifacts.store import open_store
from tests.stages.rollouts.stored import AGENTS, frame, request, rolled_out, stored_policy, stored_tasks

SCRIPTED = {"type": "scripted", "n_tokens": 5}
PROGRAM = str(Path(__file__).with_name("program.py"))


@pytest.fixture
def shelf(memory_store, policy):
    return memory_store, stored_tasks(memory_store), stored_policy(memory_store, policy)


def run(shelf, agent, **config):
    """(episodes, steps) of three attempts in processes; two at a time."""
    store, tasks, stored = shelf
    execution = {"agents": "processes", "max_concurrency": 2, "shard_tasks": 3}
    manifest = rolled_out(
        store, request(tasks, stored, {"engine": SCRIPTED, "agent": agent, **config}, execution)
    ).manifest
    return frame(store, manifest, "episodes"), frame(store, manifest, "steps")


def is_gone(process_id: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_an_agent_in_a_process_records_what_it_does_in_a_thread(shelf, policy):
    other = open_store(f"memory://{token_hex(8)}")
    config = {"engine": SCRIPTED, "agent_config": {"x": 1}}
    for name in ("three_turns", "sync_two_turns", "solver_and_judge"):
        agent = f"{AGENTS}:{name}"
        episodes, steps = run(shelf, agent, agent_config={"x": 1})
        asked = request(stored_tasks(other), stored_policy(other, policy), config | {"agent": agent})
        manifest = rolled_out(other, asked).manifest
        columns = ["episode_id", "trajectory", "step_index", "prompt_ids", "response_ids", "seed", "prefix_length"]
        assert frame(other, manifest, "steps").select(columns).sort(columns[:3]).rows() == steps.select(columns).rows()
        artifacts = ["episode_id", "status", "artifacts"]
        assert (
            frame(other, manifest, "episodes").select(artifacts).sort("episode_id").rows()
            == episodes.select(artifacts).rows()
        )


def test_a_process_reaches_the_policy_over_http_and_its_key_is_stored_nowhere(shelf):
    episodes, steps = run(shelf, f"{AGENTS}:over_http_in_turns")
    assert set(episodes["status"]) <= {"completed", "truncated"}, episodes["error"].to_list()
    assert sorted(steps["trajectory"]) == ["default"] * 3 + ["judge"] * 3
    artifacts = [json.loads(text) for text in episodes["artifacts"]]
    assert {told["key"] for told in artifacts} == {"***"}
    assert os.getpid() not in {told["process"] for told in artifacts}
    assert len({told["process"] for told in artifacts}) == 2  # one that was left clean is used again


@pytest.mark.parametrize(
    ("agent", "status", "kind", "said", "n_steps"),
    [
        ("raises_in_second_turn", "error", "ValueError", "no good", 1),
        ("asks_for_ever", "max_turns", None, None, 2),
        ("returns_nonsense", "error", "TypeError", "the agent returned a int", 1),
        ("returns_what_has_no_json", "error", "TypeError", "no canonical JSON form", 1),
        ("exits", "error", "AgentExit", r"SystemExit\(3\)", 0),
        ("cancels_itself", "error", "AgentExit", "cancelled itself", 0),
    ],
)
def test_faults_are_told_as_they_are_without_a_process(shelf, agent, status, kind, said, n_steps):
    episodes, steps = run(shelf, f"{AGENTS}:{agent}", max_turns=2)
    assert set(episodes["status"]) == {status}
    assert set(episodes["error_kind"]) == {kind}
    assert len(steps) == 3 * n_steps
    assert said is None or episodes["error"].str.contains(said).all()


def test_a_hung_agent_is_ended_with_its_children_and_its_steps_are_kept(shelf, tmp_path):
    config = {"episode_time_limit_s": 12.0, "agent_config": {"folder": str(tmp_path)}}
    episodes, steps = run(shelf, f"{AGENTS}:hangs_with_a_child", **config)
    assert set(episodes["status"]) == {"timeout"}
    assert len(steps) == 3
    left = [int(word) for file in tmp_path.iterdir() for word in file.read_text().split()]
    assert len(left) == 6
    assert all(map(is_gone, left))


def test_threads_and_children_that_an_agent_leaves_end_with_its_process(shelf):
    episodes, _ = run(shelf, f"{AGENTS}:leaves_things_behind")
    artifacts = [json.loads(text) for text in episodes["artifacts"]]
    assert len({told["process"] for told in artifacts}) == 3
    assert all(is_gone(told[name]) for told in artifacts for name in ("child", "process"))


def test_a_crash_is_its_own_episodes_error(shelf):
    episodes, steps = run(shelf, f"{AGENTS}:crashes")
    by_task = {row["task_id"]: row for row in episodes.iter_rows(named=True)}
    assert by_task["t001"]["status"] == "error"
    assert by_task["t001"]["error"] == "the agent's process was ended by SIGSEGV"
    assert {by_task[name]["artifacts"] for name in ("t000", "t002")} == {'{"answer":"fine"}'}
    assert len(steps) == 3


@pytest.mark.parametrize("how", ["stdin", "env"])
def test_a_program_that_reads_the_environment_is_an_agent(shelf, how):
    agent = {"command": [sys.executable, PROGRAM, how], "task": how, "answer": "file" if how == "env" else "stdout"}
    episodes, steps = run(shelf, agent)
    assert set(episodes["status"]) <= {"completed", "truncated"}, episodes["error"].to_list()
    joined = episodes.join(steps, on="episode_id")
    for row in joined.iter_rows(named=True):
        question = json.loads(row["messages"])[0]["content"]
        assert json.loads(row["artifacts"])["answer"] == f"{question} {row['response']}".strip()
    assert set(episodes["agent"]) == {f"command {Path(sys.executable).name}"}


def test_a_program_that_fails_or_hangs_keeps_its_steps_and_tells_no_key(shelf):
    episodes, steps = run(shelf, {"command": [sys.executable, PROGRAM, "fails"]})
    assert set(episodes["error_kind"]) == {"CommandFailed"}
    assert episodes["error"].str.contains(r"status 1: it went wrong with \*\*\*").all()
    assert len(steps) == 3
    episodes, steps = run(shelf, {"command": [sys.executable, PROGRAM, "hangs"]}, episode_time_limit_s=10.0)
    assert set(episodes["status"]) == {"timeout"}
    assert len(steps) == 3


def test_a_program_that_is_not_there_is_refused_before_work(shelf):
    with pytest.raises(NotFoundError, match="no program 'no-such-program'"):
        run(shelf, {"command": ["no-such-program"]})
