"""``overlap: 1``: the next iteration is sampled while this one trains, and every artifact says by which policy."""

import shutil
import signal
from pathlib import Path

import polars as pl
import pytest
import yaml

import rollmill as public
from stages.artifacts.store import Store, open_store
from tests.flows.background import background
from tests.flows.commands import command, rollmill
from tests.flows.trained import Trained

ITERATIONS = 4

SLOW_GRADER = '''
import time
import rollmill

@rollmill.evaluator(version="1")
def letters(task, episode):
    """Slow enough for the next rollouts to be made meanwhile."""
    time.sleep(0.1)
    return sum(map(ord, episode.response or "")) % 5 / 4

@rollmill.evaluator(version="1")
def broken(task, episode):
    """Fails on everything, late enough for the next rollouts to be made meanwhile."""
    time.sleep(0.5)
    raise RuntimeError("no")
'''


@pytest.fixture(scope="module")
def overlapped(prefect, trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The store of the tiny run, with the run ``ahead`` of the same recipe with overlap in it."""
    url = tmp_path_factory.mktemp("overlap") / "store"
    shutil.copytree(trained.url, url)
    done = rollmill("train", trained.recipe, "run=ahead", f"iterations={ITERATIONS}", "overlap=1", "--store", url)
    assert done.code == 0, done.text
    return open_store(str(url))


def test_each_iteration_is_sampled_by_the_policy_that_the_one_before_began_with(overlapped):
    records = overlapped.iterations("ahead")
    assert len(records) == ITERATIONS
    began_with = [record.artifacts["policy_in"] for record in records]
    assert len({ref.key for ref in began_with}) == ITERATIONS, "every update made another policy"
    assert [record.artifacts["policy"] for record in records[:-1]] == began_with[1:]
    assert [record.artifacts["sampled_by"] for record in records] == [began_with[0], *began_with[:-1]]
    steps = public.scan("ahead", "steps", store=overlapped).collect()
    for record in records:
        used = set(steps.filter(pl.col("iteration") == record.iteration)["policy_id"])
        assert used == {record.artifacts["sampled_by"].key}
        assert overlapped.manifest(record.artifacts["policy"]).inputs["policy"] == [record.artifacts["policy_in"]]


def test_the_update_knows_how_old_its_samples_are_and_weighs_them_against_the_policy_that_sampled(overlapped):
    metrics = public.scan("ahead", "metrics", store=overlapped).filter(stage="policy").collect()
    value = {(row["iteration"], row["name"]): row["value"] for row in metrics.iter_rows(named=True)}
    assert [value[n, "policy_lag"] for n in range(ITERATIONS)] == [0, 1, 1, 1]
    # Before its first step an update's policy is the one that sampled, or is one update further.
    assert value[0, "sampler_trainer_kl"] < 1e-8
    assert all(value[n, "sampler_trainer_kl"] > 1e-6 for n in range(1, ITERATIONS))


def test_without_overlap_nothing_is_changed_by_there_being_one(overlapped):
    plain, ahead = overlapped.iterations("tiny"), overlapped.iterations("ahead")
    for name in ("sampled_by", "policy_in", "rollouts", "rewards", "advantages", "policy"):
        assert plain[0].artifacts[name] == ahead[0].artifacts[name], "the first iteration is the same work"
    assert plain[1].artifacts["sampled_by"] == plain[1].artifacts["policy_in"]
    assert plain[1].artifacts["rollouts"] != ahead[1].artifacts["rollouts"]


def test_what_was_sampled_ahead_is_kept_when_the_scoring_beside_it_fails(prefect, trained, tmp_path):
    grader = tmp_path / "grader.py"
    grader.write_text(SLOW_GRADER)
    words = ["train", trained.recipe, "run=failing", "overlap=1", f"rewards.grader={grader}:broken"]
    done = rollmill(*words, "--store", tmp_path / "store")
    assert done.code == 1
    assert "RuntimeError" in done.err
    assert "Traceback" not in done.err
    assert len(list((tmp_path / "store" / "artifacts" / "rollouts").glob("*/manifest.json"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_a_run_that_is_ended_while_both_halves_work_is_continued_by_the_same_command(
    prefect, trained, tmp_path, number
):
    grader = tmp_path / "grader.py"
    grader.write_text(SLOW_GRADER)
    recipe = yaml.safe_load(trained.recipe.read_text())
    recipe["rewards"]["grader"] = f"{grader}:letters"
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    store = tmp_path / "store"
    words = ["train", file, "run=ended", "overlap=1", "iterations=3", "--store", store]

    def at_work(n_rollouts: int, n_rewards: int) -> bool:
        made = {
            kind: len(list(Path(store).glob(f"artifacts/{kind}/*/manifest.json"))) for kind in ("rollouts", "rewards")
        }
        return made["rollouts"] >= n_rollouts and made["rewards"] >= n_rewards

    with background(command(*words), tmp_path / "log", {}, tmp_path) as running:
        running.wait_until(lambda: at_work(2, 1))
        running.ended_by(number)
        assert "Traceback" not in running.output
    done = rollmill(*words)
    assert done.code == 0, done.text
    shelf = open_store(str(store))
    records = shelf.iterations("ended")
    assert [record.artifacts["sampled_by"] for record in records[1:]] == [
        record.artifacts["policy_in"] for record in records[:-1]
    ]
    for record in records:
        assert shelf.manifest(record.artifacts["rollouts"]).inputs["policy"] == [record.artifacts["sampled_by"]]


def test_more_than_one_iteration_ahead_is_refused(trained, tmp_path):
    done = rollmill("train", trained.recipe, "overlap=2", "--store", tmp_path / "store")
    assert done.code == 2
    assert "overlap" in done.err


def test_a_gate_with_overlap_is_refused_before_anything_is_sampled(trained, tmp_path):
    store = tmp_path / "store"
    done = rollmill("train", trained.recipe, "overlap=1", "update.gate.max_kl=0.1", "--store", store)
    assert done.code == 2
    assert "update.gate compares sampler and trainer under one policy" in done.err
    assert not store.exists()
