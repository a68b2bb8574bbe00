"""``rollmill eval``: tasks, rollouts, rewards and a report of one policy."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

import rollmill as public
from schemas.artifacts import IterationRecord
from stages.artifacts.layout import new_nonce
from stages.artifacts.store import Store, open_store
from tests.flows.commands import Done, contents, rollmill
from tests.flows.trained import Trained

SHORT = ("--limit", "4", "-n", "2", "rollouts.sampling.max_tokens=4")


def evaluate(url: str, policy: str | Path, *more: str) -> tuple[Store, str, Done]:
    """Evaluates on four tasks; returns the store, the run's name and what was printed."""
    store = open_store(url)
    before = set(store.runs())
    done = rollmill("eval", "arithmetic", "--policy", policy, *SHORT, *more, "--store", url)
    assert done.code == 0, done.text
    (run,) = set(store.runs()) - before or {""}
    return store, run, done


def test_an_evaluation_leaves_tasks_rollouts_rewards_and_a_report(trained_copy):
    store, run, done = evaluate(trained_copy.url, "tiny:policy")
    assert run.startswith("eval-arithmetic-")
    (record,) = store.iterations(run)
    assert set(record.artifacts) == {"tasks", "sampled_by", "policy_in", "rollouts", "rewards", "report"}
    assert record.artifacts["policy_in"] == store.resolve("tiny:policy").ref
    episodes = public.scan(run, "episodes", store=store).collect()
    assert episodes.group_by("task_id").len()["len"].to_list() == [2] * 4
    rewards = public.scan(run, "rewards", store=store).collect()
    assert set(rewards["grader"]) == {"numeric"}, "the benchmark's own"
    assert set(rewards["episode_id"]) == set(episodes["episode_id"])
    assert set(public.scan(run, "tasks", store=store).collect()["split"]) == {"test"}
    end = store.run_end(run)
    assert end is not None
    assert end.report == record.artifacts["report"]
    scores = public.scan(run, "task_scores", store=store).collect()
    assert scores.height >= 4

    for name in ("rollouts", "rewards"):
        for fact, value in store.manifest(record.artifacts[name]).summary.items():
            if isinstance(value, int):
                assert any({fact, f"{value:,}"} <= set(line.split()) for line in done.out.splitlines()), fact
    (page,) = [line.rpartition("Report: ")[2] for line in done.out.splitlines() if "Report: " in line]
    assert Path(page).read_text().lstrip().lower().startswith("<!doctype html>")
    commands = [line.split()[1:] for line in done.out.splitlines() if line.strip().startswith("rollmill ")]
    assert len(commands) == 2
    for command in commands:
        assert rollmill(*command).code == 0


def test_a_finished_evaluation_executes_no_stage_and_says_so(trained_copy):
    store, run, first = evaluate(trained_copy.url, "tiny:policy")
    before = contents(Path(trained_copy.url))
    _, _, again = evaluate(trained_copy.url, "tiny:policy")
    assert f"the evaluation {run} has finished; no stage was executed" in again.out
    assert again.out.split("\n", 1)[1] in first.out
    assert contents(Path(trained_copy.url)) == before
    assert store.runs() == ["eval-arithmetic-" + run.rpartition("-")[2], "tiny"]


def test_an_evaluation_of_a_run_that_has_gone_on_is_another_one(trained_copy):
    _, run, _ = evaluate(trained_copy.url, "tiny:policy")
    store = trained_copy.store
    go_on(trained_copy)
    _, later, _ = evaluate(trained_copy.url, "tiny:policy")
    assert later not in ("", run)
    used = [store.iterations(name)[0].artifacts["policy_in"] for name in (run, later)]
    assert used == [store.iterations("tiny")[n].artifacts["policy"] for n in (1, 2)]


def go_on(trained: Trained) -> None:
    """Adds an iteration to the run, whose policy is the one that it began with."""
    store = open_store(trained.url)
    records = store.iterations("tiny")
    artifacts = {**records[-1].artifacts, "policy": records[0].artifacts["policy_in"]}
    store.put_iteration(
        IterationRecord(run="tiny", iteration=2, artifacts=artifacts, finished_at=datetime.now(UTC), nonce=new_nonce())
    )


def test_a_model_folder_is_imported_and_evaluated(trained_copy, tmp_path):
    folder = tmp_path / "model"
    assert rollmill("policy", "export", "tiny:policy", folder, "--store", trained_copy.url).code == 0
    store, run, _ = evaluate(trained_copy.url, folder)
    (record,) = store.iterations(run)
    imported = store.manifest(record.artifacts["policy_in"])
    assert imported.stage == "policy_import"
    weights = [
        {e.sha256 for e in m.table_files("checkpoint") if e.name == "model.safetensors"}
        for m in (imported, store.resolve("tiny:policy"))
    ]
    assert weights[0] == weights[1]
    _, stored, _ = evaluate(trained_copy.url, "tiny:policy")
    sampled = [public.scan(name, "steps", store=store).collect() for name in (run, stored)]
    assert sorted(sampled[0]["response_ids"].to_list()) == sorted(sampled[1]["response_ids"].to_list())


def test_another_grader_reuses_the_rollouts(trained_copy):
    store, run, _ = evaluate(trained_copy.url, "tiny:policy")
    _, other, _ = evaluate(trained_copy.url, "tiny:policy", "--grader", "exact")
    (one,), (two,) = store.iterations(run), store.iterations(other)
    assert one.artifacts["rollouts"] == two.artifacts["rollouts"]
    assert one.artifacts["rewards"] != two.artifacts["rewards"]
    assert set(public.scan(other, "rewards", store=store).collect()["grader"]) == {"exact"}


@pytest.mark.parametrize("where", ["option", "variable"])
def test_a_benchmark_of_ones_own_is_a_yaml_file_beside_its_data(trained_copy, tmp_path, monkeypatch, where):
    (tmp_path / "data").mkdir()
    rows = '{"q": "What is 1 + 1?", "a": "2"}\n{"q": "What is 2 + 2?", "a": "4"}\n'
    (tmp_path / "data" / "sums.jsonl").write_text(rows)
    benchmark = tmp_path / "sums.yaml"
    benchmark.write_text(
        "description: Two sums\ndefault_split: all\nsplits: {all: ['{data_dir}/sums.jsonl']}\n"
        "fields: {instruction: '{q}', answer: '{a}'}\ngrader: exact\n"
    )
    words = ["eval", benchmark, "--policy", "tiny:policy", "run=sums", "--store", trained_copy.url]
    if where == "option":
        words += ["--data-dir", tmp_path / "data"]
    else:
        monkeypatch.setenv("ROLLMILL_DATA", str(tmp_path / "data"))
    done = rollmill(*words, "rollouts.sampling.max_tokens=4")
    assert done.code == 0, done.text
    tasks = public.scan("sums", "tasks", store=trained_copy.store).collect()
    assert sorted(tasks["answer"]) == ["2", "4"]
    assert set(tasks["benchmark"]) == {"sums"}
