"""Rerun from the middle: a stored run is scored, estimated and trained from anew, with one command each."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import rollmill as public
from schemas.artifacts import Manifest
from stages.artifacts.store import Store, open_store
from tests.flows.commands import Done, rollmill, rollmill_process
from tests.flows.trained import Trained

REWARDS = ("rewards", "rollouts=tiny:rollouts", "grader=exact")


@pytest.fixture
def shelf(request: pytest.FixtureRequest, trained: Trained) -> Iterator[str]:
    """URL of a copy of the trained store: in a folder, and in a bucket of a real S3 server."""
    if request.param == "local":
        yield request.getfixturevalue("trained_copy").url
        return
    url = request.getfixturevalue("s3_url")
    bucket = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    bucket.put(trained.url.rstrip("/") + "/", url, recursive=True)
    yield url


def stage(url: str, *arguments: str | Path) -> tuple[Manifest, Done]:
    """What ``rollmill stage`` made (or found), and what it printed."""
    done = rollmill("stage", *arguments, "--store", url)
    assert done.code == 0, done.text
    (line,) = [line for line in done.out.splitlines() if line.startswith("Look at it: rollmill show ")]
    ref = line.removeprefix("Look at it: rollmill show ").split()[0]
    return open_store(url, writable=False).resolve(ref), done


def rows(store: Store, manifest: Manifest, table: str, *without: str) -> list[dict[str, Any]]:
    return public.scan(manifest, table, store=store).drop(*without).collect().to_dicts()


@pytest.mark.parametrize("shelf", ["local", "s3"], indirect=True)
def test_rewards_advantages_and_policy_are_made_anew_with_one_command_each(shelf, trained):
    """The whole of it, on each kind of store: another grader, another estimator, and a policy from them."""
    store = open_store(shelf, writable=False)
    _, last = store.iterations("tiny")
    rewards, said = stage(shelf, *REWARDS)
    assert said.out.startswith(f"made {rewards.ref}")
    assert rewards.config["grader"] == "exact"
    assert rewards.inputs == {"tasks": [last.artifacts["tasks"]], "rollouts": [last.artifacts["rollouts"]]}
    before = store.manifest(last.artifacts["rewards"])
    scored = rows(store, rewards, "rewards")
    assert {row["grader"] for row in scored} == {"exact"}
    assert {row["episode_id"] for row in scored} == {row["episode_id"] for row in rows(store, before, "rewards")}
    answers = {row["task_id"]: row["answer"] for row in rows(store, store.manifest(last.artifacts["tasks"]), "tasks")}
    rollouts = store.manifest(last.artifacts["rollouts"])
    said_by = {row["episode_id"]: row["response"] for row in rows(store, rollouts, "steps")}
    task_of = {row["episode_id"]: row["task_id"] for row in rows(store, rollouts, "episodes")}
    for row in scored:
        right = (said_by[row["episode_id"]] or "").strip() == answers[task_of[row["episode_id"]]]
        assert row["is_correct"] == right

    # Rewards that differ are needed to train from: those of the run, with another estimator.
    advantages, _ = stage(shelf, "advantages", "rewards=tiny:rewards", "estimator=rloo")
    assert advantages.config["estimator"] == "rloo"
    assert advantages.inputs == {"rollouts": [last.artifacts["rollouts"]], "rewards": [last.artifacts["rewards"]]}
    graded = {row["episode_id"]: row["reward"] for row in rows(store, before, "rewards")}
    groups: dict[str, list[float]] = {}
    for episode, reward in graded.items():
        groups.setdefault(task_of[episode], []).append(reward)
    for row in rows(store, advantages, "advantages"):
        group = groups[task_of[row["episode_id"]]]
        reward = graded[row["episode_id"]]
        others = (sum(group) - reward) / (len(group) - 1)
        assert row["advantage"] == pytest.approx(reward - others, abs=1e-6)

    policy, _ = stage(shelf, "policy", f"advantages={advantages.ref}", "optimizer.lr=0.01")
    assert policy.inputs == {
        "policy": [last.artifacts["policy_in"]],
        "rollouts": [last.artifacts["rollouts"]],
        "advantages": [advantages.ref],
    }
    weights = {entry.name: entry.sha256 for entry in policy.table_files("checkpoint")}
    others = store.manifest(last.artifacts["policy"]).table_files("checkpoint")
    assert weights["model.safetensors"] != {entry.name: entry.sha256 for entry in others}["model.safetensors"]

    shown = rollmill("lineage", str(policy.ref), "--store", shelf)
    assert shown.code == 0
    assert str(advantages.ref) in shown.out
    assert str(last.artifacts["rollouts"]) in shown.out
    assert str(last.artifacts["advantages"]) not in shown.out, "the fork left the run's own advantages"
    compared = rollmill("diff", str(advantages.ref), "tiny:advantages", "--store", shelf)
    assert compared.code == 0
    assert "estimator" in compared.out

    again, said = stage(shelf, "advantages", "rewards=tiny:rewards", "estimator=rloo")
    assert again == advantages
    assert f"{again.ref} was on the shelf; nothing was executed" in said.out
    assert rollmill("verify", str(policy.ref), "--lineage", "--store", shelf).code == 0


@pytest.mark.parametrize("shelf", ["local", pytest.param("s3", marks=pytest.mark.slow)], indirect=True)
def test_every_other_stage_runs_alone_on_stored_references(shelf):
    store = open_store(shelf, writable=False)
    first, last = store.iterations("tiny")
    tasks, _ = stage(shelf, "tasks", "benchmark=arithmetic", "limit=3")
    assert [row["benchmark"] for row in rows(store, tasks, "tasks")] == ["arithmetic"] * 3
    rollouts, _ = stage(
        shelf, "rollouts", f"tasks={tasks.ref}", "policy=tiny:policy", "n=2", "sampling.max_tokens=4", "--seed", "5"
    )
    assert rollouts.inputs == {"tasks": [tasks.ref], "policy": [last.artifacts["policy"]]}
    assert rollouts.seed == 5
    assert len(rows(store, rollouts, "episodes")) == 6
    assert {row["policy_id"] for row in rows(store, rollouts, "steps")} == {last.artifacts["policy"].key}
    another, _ = stage(
        shelf,
        *("rollouts", f"tasks={tasks.ref}", "policy=tiny:policy", "n=2", "sampling.max_tokens=4", "--seed", "5"),
        *("--draw", "1"),
    )
    sampled = [[row["response_ids"] for row in rows(store, drawn, "steps")] for drawn in (rollouts, another)]
    assert sampled[0] != sampled[1], "another draw is another sample"
    report, _ = stage(shelf, "report", "rewards=tiny@0:rewards", "rewards=tiny:rewards")
    assert report.inputs["rewards"] == [record.artifacts["rewards"] for record in (first, last)]
    assert report.inputs["rollouts"] == [record.artifacts["rollouts"] for record in (first, last)]
    page = store.folder(report, "page") / "report.html"
    assert str(last.artifacts["rewards"]) in page.read_text()
    policy, _ = stage(shelf, "policy_init", "hidden_size=32", "n_layers=1", "max_length=64")
    assert policy.ref.key == first.artifacts["policy_in"].key, "the run began with the same work"


def modules_loaded_by(tmp_path: Path, *commands: list[str]) -> set[str]:
    """Heavy modules that a process has loaded once it has run these commands."""
    script = tmp_path / "commands.py"
    script.write_text(
        "import sys\n"
        "from flows.cli import app\n"
        "if __name__ == '__main__':\n"
        f"    for words in {[[str(word) for word in words] for words in commands]!r}:\n"
        "        app(words, standalone_mode=False)\n"
        "    heavy = ('torch', 'transformers', 'deepspeed', 'vllm', 'prefect', 'math_verify')\n"
        "    print('loaded:', *(name for name in heavy if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].removeprefix("loaded:").split())


def test_scoring_and_estimating_needs_neither_vllm_nor_a_model(trained_copy, tmp_path):
    assert importlib.util.find_spec("vllm") is None, "this environment is to prove that vLLM is not needed"
    commands = [
        ["stage", *words, "--store", trained_copy.url]
        for words in (REWARDS, ("advantages", "rewards=tiny:rewards", "estimator=rloo"))
    ]
    assert modules_loaded_by(tmp_path, *commands) == {"prefect"}


def test_what_is_on_the_shelf_is_found_without_loading_anything_heavy(trained, tmp_path):
    sampling = ["n=4", "batch.size=4", "sampling.max_tokens=6"]
    commands = [
        ["stage", "tasks", "benchmark=arithmetic", "split=train", "limit=12"],
        ["stage", "rollouts", "tasks=tiny:tasks", "policy=tiny@0:policy_in", *sampling],
        ["stage", "rewards", "rollouts=tiny:rollouts", f"grader={trained.grader}:letters"],
        ["stage", "advantages", "rewards=tiny:rewards"],
        ["stage", "policy", "advantages=tiny:advantages", "optimizer.lr=0.01"],
        ["train", trained.recipe, "run=tiny"],
        ["runs"],
        ["show", "tiny:rollouts"],
        ["lineage", "tiny:policy"],
        ["verify", "tiny:policy"],
    ]
    assert modules_loaded_by(tmp_path, *([*words, "--store", trained.url] for words in commands)) == set()


def test_the_console_script_scores_a_stored_run(trained_copy):
    done = rollmill_process("stage", *REWARDS, "--store", trained_copy.url)
    assert done.code == 0, done.text
    assert done.err == ""
    assert done.out.startswith("made rewards/")
    again = rollmill("stage", *REWARDS, "--store", trained_copy.url)
    assert "was on the shelf; nothing was executed" in again.out
    assert again.err == ""
