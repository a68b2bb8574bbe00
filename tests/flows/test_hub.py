"""A policy from the hub at a pinned commit, fetched by the hub's own library from a server that speaks its API."""

import shutil
from pathlib import Path

import pytest

from stages.artifacts.store import open_store
from tests.flows.commands import rollmill_process
from tests.flows.trained import Trained
from tests.stages.policy.hub import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(trained: Trained, tmp_path: Path) -> Path:
    """A plain model folder, with a file beside it that is no part of the model."""
    store = open_store(trained.url)
    folder = Path(shutil.copytree(store.folder(store.resolve("tiny:policy"), "checkpoint"), tmp_path / "model"))
    (folder / "training_args.bin").write_bytes(b"not wanted")
    return folder


def policies(store: Path) -> list[str]:
    return [manifest.parent.name for manifest in store.glob("artifacts/policy/*/manifest.json")]


def test_a_pinned_commit_is_fetched_and_imported_and_the_next_use_needs_no_hub(model, tmp_path):
    env = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    words = ["policy", "import", f"hf://org/name@{COMMIT}", "--store"]
    with hub(model, "org/name", COMMIT) as (url, asked):
        done = rollmill_process(*words, tmp_path / "store", env=env | {"HF_ENDPOINT": url})
        assert done.code == 0, done.text
        other = f"hf://org/name@{COMMIT[::-1]}"
        absent = rollmill_process(
            "policy", "import", other, "--store", tmp_path / "store", env=env | {"HF_ENDPOINT": url}
        )
    assert absent.code == 2
    assert f"{other} cannot be fetched" in absent.err
    assert "Traceback" not in absent.err
    assert not any("training_args" in path for path in asked)
    (made,) = policies(tmp_path / "store")
    store = open_store(tmp_path / "store")
    stored = store.folder(store.resolve(f"policy/{made}"), "checkpoint")
    for file in stored.iterdir():
        assert file.read_bytes() == (model / file.name).read_bytes()
    again = rollmill_process(*words, tmp_path / "second", env=env | {"HF_ENDPOINT": url})  # nobody listens there now
    assert again.code == 0, again.text
    assert policies(tmp_path / "second") == [made]
