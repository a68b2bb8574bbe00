"""``rollmill train``: what a run leaves behind, how it is continued, and what makes it do work again."""

import os
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import rollmill as public
from schemas.artifacts import IterationRecord, Manifest
from stages.artifacts.store import Store, open_store
from tests.flows.commands import contents, rollmill
from tests.flows.trained import Trained

STAGES = ("tasks", "rollouts", "rewards", "advantages", "policy")


def made(store: Store, record: IterationRecord, name: str) -> Manifest:
    return store.manifest(record.artifacts[name])


def weights(manifest: Manifest) -> dict[str, str]:
    """Checksums of a policy's files by name; its probe and metrics are tables and no part of it."""
    return {entry.name: entry.sha256 for entry in manifest.files if entry.rows is None}


def keys_of(url: str, kind: str) -> set[str]:
    folder = Path(url) / "artifacts" / kind
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def samples(store: Store, rollouts: Manifest) -> pl.DataFrame:
    """What was sampled, by task and attempt."""
    episodes = public.scan(rollouts, "episodes", store=store).select("episode_id", "task_id", "rollout_index", "seed")
    steps = public.scan(rollouts, "steps", store=store).select(
        "episode_id", "step_index", "messages", "prompt_ids", "response_ids", "logprobs"
    )
    return episodes.join(steps, on="episode_id").sort("task_id", "rollout_index", "step_index").collect()


def flat(lists: pl.Series) -> list[float]:
    return [value for row in lists.to_list() for value in row]


def test_a_run_records_what_each_iteration_used_and_made(trained):
    store = trained.store
    records = store.iterations("tiny")
    assert [record.iteration for record in records] == [0, 1]
    for record in records:
        assert set(record.artifacts) == {"sampled_by", "policy_in", *STAGES}
        for name in STAGES:
            assert made(store, record, name).kind == name
        rollouts, rewards = made(store, record, "rollouts"), made(store, record, "rewards")
        advantages, policy = made(store, record, "advantages"), made(store, record, "policy")
        tasks, start = record.artifacts["tasks"], record.artifacts["policy_in"]
        assert record.artifacts["sampled_by"] == start
        assert rollouts.inputs == {"tasks": [tasks], "policy": [start]}
        assert rewards.inputs == {"tasks": [tasks], "rollouts": [rollouts.ref]}
        assert advantages.inputs == {"rollouts": [rollouts.ref], "rewards": [rewards.ref]}
        assert policy.inputs == {"policy": [start], "rollouts": [rollouts.ref], "advantages": [advantages.ref]}
    assert records[1].artifacts["policy_in"] == records[0].artifacts["policy"]
    end = store.run_end("tiny")
    assert end is not None
    assert end.iterations == 2
    assert store.run("tiny").config["update"]["optimizer"]["lr"] == 0.01


def test_each_iteration_attempts_its_own_batch_with_the_policy_that_it_was_given(trained):
    episodes = public.scan("tiny", "episodes", store=trained.store).collect()
    tasks = {n: set(group["task_id"]) for (n,), group in episodes.group_by("iteration")}
    assert [len(tasks[0]), len(tasks[1])] == [4, 4]
    assert not tasks[0] & tasks[1], "one epoch attempts no task twice"
    assert episodes.group_by("iteration", "task_id").len()["len"].to_list() == [4] * 8
    steps = public.scan("tiny", "steps", store=trained.store).collect()
    for record in trained.store.iterations("tiny"):
        used = set(steps.filter(pl.col("iteration") == record.iteration)["policy_id"])
        assert used == {record.artifacts["policy_in"].key}


def test_the_policy_changes_and_the_next_engine_has_it(trained):
    store, (first, second) = trained.store, trained.store.iterations("tiny")
    start, middle, last = made(store, first, "policy_in"), made(store, first, "policy"), made(store, second, "policy")
    name = "model.safetensors"
    assert len({weights(policy)[name] for policy in (start, middle, last)}) == 3
    # What the engine sampled in the second iteration has the logprobs that the trainer's model gives to it.
    measured = public.scan(last, "metrics", store=store).filter(name="sampler_trainer_logprob_diff_max").collect()
    assert measured["value"].item() < 1e-4


def test_a_run_is_scanned_with_run_and_iteration(trained):
    rewards = public.scan("tiny", "rewards", store=trained.store).collect()
    assert rewards.columns[:2] == ["run", "iteration"]
    assert set(rewards["run"]) == {"tiny"}
    assert rewards.group_by("iteration").len().sort("iteration").rows() == [(0, 16), (1, 16)]
    for table in ("tasks", "episodes", "steps", "signals", "step_rewards", "advantages", "metrics", "probe"):
        found = public.scan("tiny", table, store=trained.store).collect()
        assert found.columns[:2] == ["run", "iteration"], table


def test_the_metrics_of_every_update_are_in_the_table(trained):
    metrics = public.scan("tiny", "metrics", store=trained.store).filter(stage="policy").collect()
    rewards = public.scan("tiny", "rewards", store=trained.store).collect()
    steps = public.scan("tiny", "steps", store=trained.store).collect()
    for iteration in (0, 1):
        rows = metrics.filter(iteration=iteration)
        value = dict(zip(rows["name"], rows["value"], strict=True))
        for name in ("loss", "kl", "clip_fraction", "entropy", "grad_norm", "tokens_per_s"):
            assert value[name] is not None, name
        given = [row["reward"] for row in rewards.filter(iteration=iteration).iter_rows(named=True)]
        assert value["reward"] == pytest.approx(sum(given) / len(given))
        lengths = [len(ids) for ids in steps.filter(iteration=iteration)["response_ids"].to_list()]
        assert value["tokens"] == sum(lengths), "every attempt was trained on"
        assert value["clip_fraction"] == 0, "the first step's ratio is 1"
        assert 0 < value["entropy"] < 5.7, "at most that of a uniform choice among 261 tokens, in nats"
        assert value["kl"] == pytest.approx(0, abs=1e-6)


def test_the_lineage_of_the_last_policy_leads_back_to_the_first(trained):
    store, (first, second) = trained.store, trained.store.iterations("tiny")
    nodes = [node.ref for _, _, node, again in store.lineage("tiny:policy").walk() if not again]
    expected = {ref for record in (first, second) for ref in record.artifacts.values()}
    assert set(nodes) == expected
    assert len(nodes) == len(expected)
    shown = rollmill("lineage", "tiny:policy", "--store", trained.url)
    assert shown.code == 0
    assert all(str(ref) in shown.out for ref in expected)


def test_the_command_shows_the_numbers_of_the_artifacts_and_how_to_look_at_them(trained):
    store, lines = trained.store, trained.output.out.splitlines()
    for record in store.iterations("tiny"):
        rewards, advantages = made(store, record, "rewards").summary, made(store, record, "advantages").summary
        numbers = [f"{rewards['mean_reward']:.4g}", f"{rewards['pass_rate']:.4g}", str(advantages["n_kept"])]
        row = next(line.split() for line in lines if line.split()[:1] == [str(record.iteration)])
        assert row[1:4] == numbers
    assert trained.url in trained.output.out
    commands = [line.split()[1:] for line in lines if line.strip().startswith("rollmill ")]
    assert len(commands) == 3
    for command in commands:
        assert rollmill(*command).code == 0
    (page,) = [Path(line.split()[-1]) for line in lines if line.startswith("Report: ")]
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


def test_the_command_prints_its_own_lines_and_no_library_any(trained):
    assert trained.output.out.splitlines()[0].strip() == "run tiny"
    assert [line.split("  ")[0] for line in trained.output.err.splitlines()] == ["iteration 0 of 2", "iteration 1 of 2"]
    for line in trained.output.err.splitlines():
        assert " -" not in line, f"a number is not known: {line}"


def test_a_finished_run_started_again_executes_no_stage_and_says_so(trained):
    before = contents(Path(trained.url))
    done = rollmill("train", trained.recipe, "run=tiny", "--store", trained.url)
    assert done.code == 0
    assert done.out.startswith("the run tiny has finished; no stage was executed")
    assert done.out.split("\n", 1)[1] in trained.output.out, "it shows the same end"
    assert contents(Path(trained.url)) == before


def test_the_flow_of_a_finished_run_executes_no_stage_either(trained):
    from flows.cli.prefect import quiet

    before = contents(Path(trained.url))
    with quiet():
        from flows.train import train

        result = train(str(trained.recipe), ["run=tiny"], trained.url)
    (_, last) = trained.store.iterations("tiny")
    assert result == {
        "run": "tiny",
        "store": trained.url,
        "artifacts": {name: str(ref) for name, ref in last.artifacts.items()},
    }
    assert contents(Path(trained.url)) == before


def test_prefect_is_handed_references_and_no_data(trained):
    stored = [path for path in Path(os.environ["PREFECT_HOME"]).glob("storage/**/*") if path.is_file()]
    assert stored, "flows persist what they return"
    assert max(path.stat().st_size for path in stored) < 4096


def forget_iteration(trained: Trained, iteration: int) -> None:
    """Leaves of the copied store what a run that was killed in ``iteration`` leaves: its rollouts are half done."""
    store, root = trained.store, Path(trained.url)
    record = store.iterations(trained.run)[iteration]
    end = store.run_end(trained.run)
    assert end is not None
    assert end.report is not None
    for ref in [record.artifacts[name] for name in ("rewards", "advantages", "policy")] + [end.report]:
        shutil.rmtree(root / "artifacts" / ref.kind / ref.key)
    rollouts = root / "artifacts" / "rollouts" / record.artifacts["rollouts"].key
    (rollouts / "manifest.json").unlink()
    (rollouts / "receipts" / "00001.json").unlink()
    (root / "runs" / trained.run / "end.json").unlink()
    (root / "runs" / trained.run / "iterations" / f"{iteration:05d}.json").unlink()


def test_an_interrupted_run_is_continued_by_the_same_command_to_the_same_policy(trained, trained_copy):
    forget_iteration(trained_copy, 1)
    left = contents(Path(trained_copy.url))
    done = rollmill("train", trained_copy.recipe, "run=tiny", "--store", trained_copy.url)
    assert done.code == 0, done.text
    assert "iteration 0 of 2" not in done.err, "a finished iteration is not shown as work"
    assert "iteration 1 of 2" in done.err
    after = contents(Path(trained_copy.url))
    assert {path: after[path] for path in left} == left, "nothing that was there was made again"

    before, now = trained.store.iterations("tiny")[1], trained_copy.store.iterations("tiny")[1]
    assert now.artifacts["rollouts"].key == before.artifacts["rollouts"].key
    one = samples(trained.store, made(trained.store, before, "rollouts"))
    other = samples(trained_copy.store, made(trained_copy.store, now, "rollouts"))
    assert one.drop("logprobs").equals(other.drop("logprobs"))
    # The engine's batches depend on when its calls arrive, and with them the last bits of a logprob.
    np.testing.assert_allclose(flat(one["logprobs"]), flat(other["logprobs"]), atol=1e-5)
    probes = [
        public.scan(made(store, record, "policy"), "probe", store=store).sort("probe_id").collect()["logprobs"]
        for store, record in ((trained.store, before), (trained_copy.store, now))
    ]
    np.testing.assert_allclose(flat(probes[0]), flat(probes[1]), atol=1e-3)
    assert trained_copy.store.run_end("tiny") is not None


def test_a_changed_learning_rate_keeps_the_rollouts_and_changes_the_policy(trained, trained_copy):
    done = rollmill(
        "train", trained.recipe, "run=faster", "iterations=1", "update.optimizer.lr=0.02", "--store", trained_copy.url
    )
    assert done.code == 0, done.text
    (record,), before = trained_copy.store.iterations("faster"), trained.store.iterations("tiny")[0]
    for name in ("tasks", "policy_in", "rollouts", "rewards", "advantages"):
        assert record.artifacts[name] == before.artifacts[name], name
        assert keys_of(trained_copy.url, record.artifacts[name].kind) - {record.artifacts["policy"].key} == keys_of(
            trained.url, record.artifacts[name].kind
        )
    assert record.artifacts["policy"].key != before.artifacts["policy"].key
    assert weights(made(trained_copy.store, record, "policy")) != weights(made(trained.store, before, "policy"))


def test_a_changed_temperature_makes_other_rollouts_from_the_same_tasks_and_policy(trained, trained_copy):
    done = rollmill(
        "train",
        trained.recipe,
        "run=cooler",
        "iterations=1",
        "rollouts.sampling.temperature=0.7",
        "--store",
        trained_copy.url,
    )
    assert done.code == 0, done.text
    (record,), before = trained_copy.store.iterations("cooler"), trained.store.iterations("tiny")[0]
    assert record.artifacts["tasks"] == before.artifacts["tasks"]
    assert record.artifacts["policy_in"] == before.artifacts["policy_in"]
    assert record.artifacts["rollouts"].key != before.artifacts["rollouts"].key
    rollouts = made(trained_copy.store, record, "rollouts")
    steps = public.scan(rollouts, "steps", store=trained_copy.store).collect()
    assert set(steps["temperature"]) == {0.7}


def test_how_the_work_is_done_changes_no_key_and_no_sample(trained, tmp_path):
    url = str(tmp_path / "other")
    how = ["rollouts.shard_tasks=3", "rollouts.max_batch=5", "rollouts.max_concurrency=7", "rewards.workers=2"]
    how += ["rewards.shard_episodes=4", "rewards.chunk_size=1", "shards_at_once=1"]
    overrides = [f"execution.{setting}" for setting in how]
    done = rollmill("train", trained.recipe, "run=tiny", "iterations=1", *overrides, "--store", url)
    assert done.code == 0, done.text
    store = open_store(url, writable=False)
    (record,), before = store.iterations("tiny"), trained.store.iterations("tiny")[0]
    assert store.run("tiny").config == trained.store.run("tiny").config | {"iterations": 1}
    for name in ("tasks", "policy_in", "rollouts"):
        assert record.artifacts[name].key == before.artifacts[name].key, name
    one, other = (
        samples(trained.store, made(trained.store, before, "rollouts")),
        samples(store, made(store, record, "rollouts")),
    )
    assert one.drop("logprobs").equals(other.drop("logprobs"))
    assert np.abs(np.subtract(flat(one["logprobs"]), flat(other["logprobs"]))).max() < 1e-5
    assert len(made(store, record, "rollouts").table_files("steps")) == 2
    assert len(made(store, record, "rewards").table_files("rewards")) == 2


def test_another_seed_gives_other_samples(trained, trained_copy):
    done = rollmill("train", trained.recipe, "run=seeded", "iterations=1", "seed=1", "--store", trained_copy.url)
    assert done.code == 0, done.text
    (record,), before = trained_copy.store.iterations("seeded"), trained.store.iterations("tiny")[0]
    assert record.artifacts["tasks"] == before.artifacts["tasks"], "tasks draw nothing at random"
    assert record.artifacts["policy_in"].key != before.artifacts["policy_in"].key
    one = samples(trained.store, made(trained.store, before, "rollouts"))
    other = samples(trained_copy.store, made(trained_copy.store, record, "rollouts"))
    assert set(one["seed"]).isdisjoint(other["seed"])
    assert one["response_ids"].to_list() != other["response_ids"].to_list()


def test_a_penalty_on_the_divergence_refers_to_the_first_policy(trained, trained_copy):
    done = rollmill("train", trained.recipe, "run=held", "update.kl.coefficient=0.1", "--store", trained_copy.url)
    assert done.code == 0, done.text
    records = trained_copy.store.iterations("held")
    start = records[0].artifacts["policy_in"]
    assert [made(trained_copy.store, record, "policy").inputs["reference"] for record in records] == [[start], [start]]
    assert records[0].artifacts["rollouts"] == trained.store.iterations("tiny")[0].artifacts["rollouts"]


def test_a_role_that_another_policy_answers_for_is_not_trained_on(trained, trained_copy):
    first = trained.store.iterations("tiny")[0].artifacts["policy_in"]
    settings = ["rollouts.agent=solver_judge", "rewards.grader=exact", "rewards.params={of: answers}", "iterations=1"]
    settings += ["advantages.drop_flat_groups=false", "policy.new.max_length=256"]
    done = rollmill(
        "train",
        trained.recipe,
        "run=held",
        *settings,
        f"rollouts.roles.solver-*.policy={first}",
        "--store",
        trained_copy.url,
    )
    assert done.code == 0, done.text
    store = trained_copy.store
    (record,) = store.iterations("held")
    assert made(store, record, "rollouts").inputs["role_policies"] == [first]
    advantages = public.scan("held", "advantages", store=store).collect()
    solvers = advantages.filter(advantages["trajectory"].str.starts_with("solver-"))
    assert len(solvers) == 32
    assert set(solvers["drop_reason"]) == {"other_policy"}
    judges = advantages.filter(trajectory="judge")
    assert len(judges) == 16
    assert "other_policy" not in set(judges["drop_reason"])


def test_imitation_of_the_best_is_a_recipe_too(trained, trained_copy):
    settings = ["advantages.estimator=rejection", "update.objective=cross_entropy", "iterations=1"]
    done = rollmill("train", trained.recipe, "run=best", *settings, "--store", trained_copy.url)
    assert done.code == 0, done.text
    (record,) = trained_copy.store.iterations("best")
    assert record.artifacts["rewards"] == trained.store.iterations("tiny")[0].artifacts["rewards"]
    kept = public.scan("best", "advantages", store=trained_copy.store).filter("kept").collect()
    rewards = public.scan("best", "rewards", store=trained_copy.store).collect()
    episodes = public.scan("best", "episodes", store=trained_copy.store).collect()
    scored = rewards.join(episodes.select("episode_id", "task_id"), on="episode_id")
    best = {task: group["reward"].max() for (task,), group in scored.group_by("task_id")}
    chosen = scored.join(kept.select("episode_id"), on="episode_id")
    assert 0 < chosen.height < scored.height
    assert all(row["reward"] == best[row["task_id"]] for row in chosen.iter_rows(named=True))


def test_a_run_without_a_name_is_named_after_its_recipe_and_settings(trained, trained_copy):
    arguments = ["train", trained.recipe, "iterations=1", "--store", trained_copy.url]
    assert rollmill(*arguments).code == 0
    (name,) = set(trained_copy.store.runs()) - {"tiny"}
    assert name.startswith("tiny-")
    assert f"the run {name} has finished; no stage was executed" in rollmill(*arguments).out
