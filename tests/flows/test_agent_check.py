"""``rollmill agent check``: what it shows of a good agent and of a bad one."""

from pathlib import Path

from tests.flows.commands import rollmill

AGENTS = Path(__file__).resolve().parents[1] / "stages" / "rollouts" / "given_agents.py"


def test_an_agents_calls_are_shown_by_trajectory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = rollmill("agent", "check", f"{AGENTS}:solver_and_judge", "--task", "2 + 2")
    assert done.code == 0, done.text
    assert "status: truncated" in done.out
    assert all(name in done.out for name in ("solver-0", "solver-1", "judge", "returned: {", "2 + 2"))
    assert list(tmp_path.iterdir()) == []  # no store is made here


def test_a_bad_agent_is_told_and_its_calls_are_shown() -> None:
    done = rollmill("agent", "check", f"{AGENTS}:raises_in_second_turn", "execution.agents=processes")
    assert done.code == 1
    assert "ValueError: no good" in done.out
    assert "default" in done.out
    done = rollmill("agent", "check", f"{AGENTS}:three_turn")
    assert done.code == 2
    assert "did you mean 'three_turns'?" in done.err
