"""One tiny training run, made once a session by the real command and read by many tests."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from stages.artifacts.store import Store, open_store
from tests.flows.commands import Done, rollmill

GRADER = '''
import rollmill

@rollmill.evaluator(version="1")
def letters(task, episode):
    """Depends on every character, so that a random policy's attempts at a task earn different rewards."""
    reward = sum(map(ord, episode.response or "")) % 5 / 4
    return rollmill.EvalOutput(reward=reward, is_correct=reward > 0.5)
'''


@dataclass(frozen=True)
class Trained:
    """A finished run in a local store."""

    url: str
    run: str
    recipe: Path
    grader: Path
    output: Done
    """What the command printed."""

    @property
    def store(self) -> Store:
        return open_store(self.url, writable=False)


@pytest.fixture(scope="session")
def prefect() -> Iterator[None]:
    """Prefect's server, started once for all commands that run in this process, as each would start its own."""
    from flows.cli.prefect import quiet

    with quiet():
        yield


@pytest.fixture(scope="session")
def grader_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grader of the user's own, ``letters``."""
    file = tmp_path_factory.mktemp("grader") / "grader.py"
    file.write_text(GRADER)
    return file


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, grader_file: Path) -> Path:
    """Two iterations of four tasks with four attempts each, by a policy of one layer; a second or two of work."""
    file = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe(grader_file)))
    return file


def recipe(grader: Path) -> dict[str, object]:
    """The settings of ``recipe_file``."""
    return {
        "iterations": 2,
        "policy": {"new": {"hidden_size": 32, "n_layers": 1, "max_length": 64}},
        "tasks": {"benchmark": "arithmetic", "split": "train", "limit": 12},
        "rollouts": {"n": 4, "batch": {"size": 4}, "sampling": {"max_tokens": 6}},
        "rewards": {"grader": f"{grader}:letters"},
        "update": {"optimizer": {"lr": 0.01}},
        "execution": {"rollouts": {"shard_tasks": 2, "threads": 1}, "rewards": {"workers": 1}},
    }


@pytest.fixture(scope="session")
def trained(prefect: None, tmp_path_factory: pytest.TempPathFactory, recipe_file: Path, grader_file: Path) -> Trained:
    """The run ``tiny`` of ``recipe_file``. Tests that add to its store copy it first (``trained_copy``)."""
    url = str(tmp_path_factory.mktemp("trained") / "store")
    output = rollmill("train", recipe_file, "run=tiny", "--store", url)
    assert output.code == 0, output.text
    return Trained(url, "tiny", recipe_file, grader_file, output)


@pytest.fixture
def trained_copy(trained: Trained, tmp_path: Path) -> Trained:
    """A copy of the trained store that a test may add to or damage."""
    url = tmp_path / "copy"
    shutil.copytree(trained.url, url)
    return Trained(str(url), trained.run, trained.recipe, trained.grader, trained.output)
