"""Config files and dotted overrides become settings, as a person means them."""

import pytest

from flows.loading import load_config, read_yaml, with_overrides
from flows.recipes import FOLDER, EvaluateRecipe, TrainRecipe, load_recipe, recipe_settings
from schemas.config import ConfigModel
from schemas.errors import ConfigError, NotFoundError


class Inner(ConfigModel):
    rate: float = 1.0


class Outer(ConfigModel):
    count: int = 1
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e-4", 1e-4),
        ("-2E+3", -2000.0),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("{a: 1}", {"a": 1}),
        ("{a: null}", {"a": None}),
        ("{question}", "{question}"),
        ("{}", {}),
        ("What is {question}?", "What is {question}?"),
        ("tiny:policy", "tiny:policy"),
        ("path/to/file.py:name", "path/to/file.py:name"),
        ("a=b", "a=b"),
        ("- [ unbalanced", "- [ unbalanced"),
        ("'3'", "3"),
        ("", None),
    ],
)
def test_the_value_of_an_override_is_what_it_looks_like(text, value):
    found = with_overrides({}, [f"some.key={text}"])["some"]["key"]
    assert found == value
    assert type(found) is type(value)


def test_later_overrides_win_and_the_given_values_stay_untouched():
    values = {"inner": {"rate": 2.0}, "count": 3}
    assert with_overrides(values, ["inner.rate=3", "inner.rate=4", "other.new.deep=1"]) == {
        "inner": {"rate": 4},
        "count": 3,
        "other": {"new": {"deep": 1}},
    }
    assert values == {"inner": {"rate": 2.0}, "count": 3}


def test_a_group_that_is_null_can_be_given_a_setting():
    assert with_overrides({"inner": None}, ["inner.rate=3"]) == {"inner": {"rate": 3}}


@pytest.mark.parametrize("override", ["count", "=3", " =3", "inner.rate.more=1"])
def test_an_override_that_names_no_setting_is_refused(override):
    with pytest.raises(ConfigError, match=r"override"):
        with_overrides({"inner": {"rate": 1.0}}, [override])


def test_a_file_and_its_overrides_become_a_model(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("count: 2\ninner: {rate: 1e-3}\n")
    assert load_config(Outer, file) == Outer(count=2, inner=Inner(rate=1e-3))
    assert load_config(Outer, file, ["count=5"]).count == 5
    with pytest.raises(ConfigError, match=r"config.yaml: unknown key 'inner.rat': did you mean 'rate'"):
        load_config(Outer, file, ["inner.rat=5"])


def test_anchors_and_merges_are_yaml_and_a_key_that_stands_twice_is_not(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("one: &one {rate: 1}\ntwo: {<<: *one}\n")
    assert read_yaml(file)["two"] == {"rate": 1}
    file.write_text("inner:\n  rate: 1\n  rate: 2\n")
    with pytest.raises(ConfigError, match=r"config.yaml line 3, column 3: .*'rate' stands twice"):
        read_yaml(file)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_recipe_that_is_shipped_is_valid(file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    settings = recipe_settings(file.stem)
    model = TrainRecipe if "iterations" in settings else EvaluateRecipe
    given = [] if "policy" in settings else ["policy.ref=policy/abcd"]
    by_name, label = load_recipe(model, file.stem, given)
    by_path, _ = load_recipe(model, str(file), given)
    assert by_name == by_path
    assert label == file.stem


def test_a_recipe_of_ones_own_goes_before_a_shipped_one_of_the_same_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text((FOLDER / "demo.yaml").read_text().replace("iterations: ", "iterations: 1"))
    assert load_recipe(TrainRecipe, "demo", [])[0].iterations == int(f"1{recipe_settings_of_demo()['iterations']}")
    with pytest.raises(NotFoundError, match="there is no recipe 'dmo'"):
        load_recipe(TrainRecipe, "dmo", [])


def recipe_settings_of_demo():
    return read_yaml(FOLDER / "demo.yaml")


def test_how_the_work_is_done_is_no_part_of_what_a_run_is():
    settings = recipe_settings_of_demo()
    one, _ = load_recipe(TrainRecipe, settings, [])
    other, _ = load_recipe(
        TrainRecipe,
        settings,
        ["execution.rollouts.max_batch=3", "execution.policy.processes=2", "execution.shards_at_once=1", "run=x"],
        "s3://elsewhere/shelf",
    )
    changed, _ = load_recipe(TrainRecipe, settings, ["update.optimizer.lr=0.123"])
    assert one.identity() == other.identity()
    assert one.identity() != changed.identity()
    assert other.execution.store == "s3://elsewhere/shelf"
