"""A user's grader is found and versioned by reading its source; none of its code runs for that."""

from pathlib import Path

import pytest

from schemas.errors import InputError, NotFoundError
from stages.rewards.functions import source_version
from tests.stages.rewards.helpers import own

TRAP = "raise SystemExit('the source was run')\n"


def written(folder: Path, text: str, name: str = "own.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_any_edit_of_the_source_is_another_version(tmp_path: Path) -> None:
    name = written(tmp_path, TRAP + "def grade(task, episode): return 1.0") + ":grade"
    first = source_version(name)
    assert len(first) == 16
    assert source_version(name) == first
    written(tmp_path, TRAP + "def grade(task, episode): return 0.5")
    assert source_version(name) != first


@pytest.mark.parametrize(
    "source",
    [
        TRAP + "__version__ = '7'\ndef grade(task, episode): return {value}",
        TRAP + "@evaluator(version='7')\ndef grade(task, episode): return {value}",
        TRAP + "__version__ = '1'\n@rollmill.evaluator(version='7')\nasync def grade(task, episode): return {value}",
    ],
)
def test_a_version_that_its_author_states_counts_and_edits_do_not(tmp_path: Path, source: str) -> None:
    for value in ("1.0", "0.5"):
        assert source_version(written(tmp_path, source.format(value=value)) + ":grade") == "7"


def test_modules_are_found_without_importing_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, TRAP, "ownpack/__init__.py")
    written(tmp_path, TRAP + "try:\n  from x import grade\nexcept ImportError:\n  grade = None", "ownpack/inner.py")
    monkeypatch.chdir(tmp_path)
    assert source_version("ownpack.inner:grade") == source_version(f"{tmp_path}/ownpack/inner.py:grade")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (own("evn"), "did you mean 'even'"),
        ("nowhere/own.py:grade", "there is no file"),
        ("no_such_module_here:grade", "there is no module 'no_such_module_here'"),
        ("stages.no_such_module:grade", "there is no module"),
        ("stages:grade:", "neither"),
        (":grade", "neither"),
        ("stages:not a name", "neither"),
    ],
)
def test_what_does_not_exist_is_said(name: str, message: str) -> None:
    with pytest.raises(NotFoundError, match=message) as caught:
        source_version(name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def grade(task, episode) return 1", "not valid Python"),
        ("__version__ = str(7)\ndef grade(task, episode): return 1", "line 1, is not a string literal"),
        ("__version__ = 7\ndef grade(task, episode): return 1", "is not a string literal"),
    ],
)
def test_a_source_that_gives_no_version_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        source_version(written(tmp_path, source) + ":grade")


def test_a_module_without_source_is_refused() -> None:
    with pytest.raises(InputError, match="no Python source"):
        source_version("itertools:count")
