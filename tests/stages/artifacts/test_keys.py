"""Keys: equal work has an equal key, and whatever changes the result changes the key."""

from typing import Any, ClassVar

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st
from pydantic import Field

from schemas.artifacts import Manifest
from schemas.config import ConfigModel
from schemas.errors import ConfigError, KindError
from stages.artifacts.commit import Request
from stages.artifacts.stage import InputSpec
from stages.artifacts.store import Store
from tests.builders import (
    NoExecution,
    Numbers,
    NumbersExecution,
    numbers_request,
    stored_policy,
    stored_rollouts,
    stored_tasks,
)


class Settings(ConfigModel):
    values: dict[str, Any] = Field(default_factory=dict)
    path: str = "x"


class Scoring(Numbers):
    name = "scoring"
    stochastic = False
    inputs: ClassVar[dict[str, InputSpec]] = {
        "tasks": InputSpec("tasks"),
        "rollouts": InputSpec("rollouts", many=True),
        "policy": InputSpec("policy", optional=True),
    }
    Config = Settings  # type: ignore[assignment]
    Execution = NoExecution  # type: ignore[assignment]


def key(stage: Any = None, config: ConfigModel | None = None, **rest: Any) -> str:
    return Request(stage or Numbers(), config or Settings(), rest.pop("execution", NoExecution()), **rest).key


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@for_all(st.dictionaries(st.text(max_size=4), plain, max_size=4))
def test_the_order_of_settings_does_not_change_the_key(values: dict[str, Any]) -> None:
    backwards = dict(reversed(list(values.items())))
    assert key(config=Settings(values=values), seed=1) == key(config=Settings(values=backwards), seed=1)


@for_all(plain, plain)
def test_different_settings_have_different_keys(a: Any, b: Any) -> None:
    same = repr(a) == repr(b)
    assert (key(config=Settings(values={"x": a}), seed=1) == key(config=Settings(values={"x": b}), seed=1)) is same or (
        a == b
    )


@for_all(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 9), st.integers(0, 9))
def test_seed_and_draw_change_the_key_of_a_stochastic_stage(s1: int, s2: int, d1: int, d2: int) -> None:
    assert (key(seed=s1, draw=d1) == key(seed=s2, draw=d2)) is ((s1, d1) == (s2, d2))


def test_a_key_is_the_same_on_every_machine() -> None:
    """Known value: a change of it would orphan every stored artifact, so the format version must rise with it."""
    assert numbers_request().key == "f471d78e1866778c98aefd4224257444671ac42a765fb834d83339a4629df6c4"


def test_how_the_work_is_done_never_enters_the_key() -> None:
    assert numbers_request(execution=NumbersExecution(pause_s=9, n_shards=4, log="x")).key == numbers_request().key


@pytest.mark.parametrize("change", [{"name": "other"}, {"version": 2}, {"tables": ("tasks", "metrics")}])
def test_another_stage_version_or_schema_has_another_key(change: dict[str, Any]) -> None:
    assert key(type("Changed", (Numbers,), change)(), seed=1) != key(seed=1)


def test_a_schema_version_enters_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from schemas.tables import TABLES

    before = key(seed=1)
    monkeypatch.setitem(TABLES, "tasks", replace(TABLES["tasks"], version=2))
    assert key(seed=1) != before


def test_a_deterministic_stage_has_one_key_whatever_the_seed(store: Store) -> None:
    tasks, policy = stored_tasks(store), stored_policy(store)
    inputs = {"tasks": [tasks], "rollouts": [stored_rollouts(store, tasks, policy)]}
    assert (
        key(Scoring(), inputs=inputs, seed=1) == key(Scoring(), inputs=inputs, seed=2) == key(Scoring(), inputs=inputs)
    )
    with pytest.raises(ConfigError, match="draw 1"):
        key(Scoring(), inputs=inputs, draw=1)


def test_the_content_of_inputs_enters_the_key_and_not_how_they_were_made(store: Store) -> None:
    tasks, policy = stored_tasks(store), stored_policy(store)
    rollouts, fewer = stored_rollouts(store, tasks, policy), stored_rollouts(store, tasks, policy, samples=1)

    def with_inputs(**inputs: list[Manifest]) -> str:
        return key(Scoring(), inputs={"tasks": [tasks], "rollouts": [rollouts]} | inputs)

    remade = rollouts.model_copy(update={"key": "0" * 64, "nonce": "other"})
    assert with_inputs(rollouts=[remade]) == with_inputs()
    assert with_inputs(policy=[]) == with_inputs()
    different = {
        with_inputs(),
        with_inputs(rollouts=[fewer]),
        with_inputs(rollouts=[rollouts, fewer]),
        with_inputs(rollouts=[fewer, rollouts]),
        with_inputs(policy=[policy]),
    }
    assert len(different) == 5


def test_inputs_that_do_not_fit_the_stage_are_refused(store: Store) -> None:
    tasks, policy = stored_tasks(store), stored_policy(store)
    rollouts = stored_rollouts(store, tasks, policy)
    with pytest.raises(ConfigError, match="needs the input 'rollouts'"):
        key(Scoring(), inputs={"tasks": [tasks]})
    with pytest.raises(ConfigError, match="takes one 'tasks', got 2"):
        key(Scoring(), inputs={"tasks": [tasks, tasks], "rollouts": [rollouts]})
    with pytest.raises(KindError, match="must be of kind rollouts"):
        key(Scoring(), inputs={"tasks": [tasks], "rollouts": [policy]})
    with pytest.raises(ConfigError, match="takes no input 'extra'"):
        key(Scoring(), inputs={"tasks": [tasks], "rollouts": [rollouts], "extra": [tasks]})


def test_a_stochastic_stage_needs_a_seed() -> None:
    with pytest.raises(ConfigError, match="needs a seed"):
        key()


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, lambda: 1])
def test_a_setting_without_a_stable_form_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"values\.x"):
        key(config=Settings(values={"x": value}), seed=1)
