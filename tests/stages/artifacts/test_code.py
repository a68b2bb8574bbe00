"""Which code did the work, and that no credential is written down."""

import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from stages.artifacts import code
from stages.artifacts.credentials import redacted, refuse_credentials


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    return tmp_path


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    commit, dirty = code._checkout(checkout)
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    (checkout / "untracked").write_text("x")
    assert code._checkout(checkout) == (commit, False)


def test_a_changed_file_makes_a_checkout_dirty(checkout: Path) -> None:
    (checkout / "file").write_text("2")
    assert code._checkout(checkout)[1] is True


def test_a_git_hook_does_not_lead_elsewhere(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = code._checkout(checkout)
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    assert code._checkout(checkout) == expected


def test_an_installed_rollmill_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    """Also where it is installed inside somebody else's checkout."""
    (checkout / "site-packages").mkdir()
    assert code._checkout(checkout / "site-packages") == (None, None)


def test_a_machine_without_git_has_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert code._checkout(checkout) == (None, None)


def test_versions_are_found_without_importing_anything() -> None:
    program = (
        "import sys; from stages.artifacts.code import library_versions; found = library_versions();"
        "assert {'torch', 'transformers', 'polars'} <= set(found), found;"
        "heavy = {'torch', 'transformers', 'deepspeed', 'prefect', 'polars'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_rollmill_is_light() -> None:
    program = (
        "import sys, rollmill; heavy = {'torch', 'transformers', 'deepspeed', 'prefect', 'polars', 's3fs'}"
        " & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"a": {"api_key": "x"}}, "a.api_key"),
        ({"urls": ["http://u:p@h"]}, "urls.0"),
        ({"url": "s3://id:secret@bucket/x"}, "url"),
        ({"url": "http://h/?a=1&access_token=t"}, "url"),
        ({"hub": {"auth_token": "hf_x"}}, "hub.auth_token"),
        ({"password": "x"}, "password"),
    ],
)
def test_a_credential_in_a_config_is_refused_by_its_path(values: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"recipe: {name} holds a credential"):
        refuse_credentials(values, "recipe")
    assert redacted(values) != values


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 5, "stop_token": "</s>", "key": "answer", "pad_token": "x", "token_level": "a"},
        {"url": "https://host:8000/v1", "mail": "a@b.org", "text": "see http://x and write to a@b.org"},
        {"api_key": None, "password": ""},
        {"path": "hf://openai/gsm8k@main/train.parquet"},
    ],
)
def test_what_is_no_credential_stays(values: dict[str, object]) -> None:
    refuse_credentials(values, "recipe")
    assert redacted(values) == values
