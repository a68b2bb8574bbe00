import sys

import pytest

from schemas.errors import InputError, NotFoundError
from schemas.loading import code_version, load_object


def test_a_function_is_found_in_a_file_and_in_a_module(tmp_path, monkeypatch):
    (tmp_path / "loading_example.py").write_text("def solve():\n    return 7\n")
    assert load_object(f"{tmp_path}/loading_example.py:solve", "agent")() == 7
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_object("loading_example:solve", "agent")() == 7


def test_a_changed_file_is_loaded_anew_and_has_another_version(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("VALUE = 1\n")
    before = code_version(f"{file}:VALUE", "agent")
    assert load_object(f"{file}:VALUE", "agent") == 1
    file.write_text("VALUE = 2\n")
    assert load_object(f"{file}:VALUE", "agent") == 2
    assert code_version(f"{file}:VALUE", "agent") != before


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("nothing", NotFoundError, "neither"),
        ("no_such_module_here:f", NotFoundError, "no module"),
        ("json.no_such_part:f", NotFoundError, "no module"),
        ("no/such/file.py:f", NotFoundError, "no file"),
        ("json:lodas", NotFoundError, "did you mean 'loads'"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_missing(name, error, said):
    with pytest.raises(error, match=said):
        load_object(name, "agent")


def test_a_module_that_fails_is_named_with_its_own_error(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import no_such_dependency_here\n")
    with pytest.raises(InputError, match="no_such_dependency_here"):
        load_object(f"{file}:f", "grader")
    file.write_text("1 / 0\n")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        load_object(f"{file}:f", "grader")
