"""The logs of a run's workers lie in a folder of the run's own, unless the user names another."""

from pathlib import Path

from flows.runs import logs_beside
from stages.rollouts.config import RolloutsExecution
from tests.flows.trained import Trained


def test_a_run_has_a_folder_for_its_logs(monkeypatch):
    monkeypatch.delenv("ROLLMILL_LOGS", raising=False)
    assert logs_beside(RolloutsExecution(), "demo").vllm.log_dir == str(Path("logs") / "demo")
    monkeypatch.setenv("ROLLMILL_LOGS", "/var/log/rollmill")
    assert logs_beside(RolloutsExecution(), "demo").vllm.log_dir == "/var/log/rollmill/demo"
    named = RolloutsExecution.model_validate({"vllm": {"log_dir": "mine"}})
    assert logs_beside(named, "demo") == named


def test_rollouts_of_a_run_are_executed_with_it(trained: Trained):
    record = trained.store.iterations("tiny")[0]
    rollouts = trained.store.manifest(record.artifacts["rollouts"])
    assert rollouts.execution["vllm"]["log_dir"] == str(Path("logs") / "tiny")
