"""Canonical JSON: one value has one form, and what has none is refused by its place."""

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from enum import Enum, IntEnum, StrEnum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from schemas.canonical import canonical_hash, canonical_json, seed_from

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)


@given(plain)
def test_canonical_json_is_json_and_a_fixed_point(value: Any) -> None:
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    assert json.loads(text) == value
    text.encode()


@given(st.dictionaries(st.text(max_size=5), plain, min_size=2, max_size=5), st.randoms())
def test_the_order_of_keys_does_not_matter(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)


@given(plain, plain)
def test_different_values_have_different_forms(a: Any, b: Any) -> None:
    if canonical_json(a) == canonical_json(b):
        assert a == b


@pytest.mark.parametrize(
    ("value", "form"),
    [
        ({"b": 1, "a": [True, None, "é\n"]}, '{"a":[true,null,"é\\n"],"b":1}'),
        (1, "1"),
        (1.0, "1.0"),
        (1e-5, "1e-05"),
        (0.1 + 0.2, "0.30000000000000004"),
        ((1, 2), "[1,2]"),
        (datetime(2026, 9, 1, 14, tzinfo=timezone(timedelta(hours=2))), '"2026-09-01T12:00:00.000000+00:00"'),
        (PurePosixPath("a/b"), '"a/b"'),
        (StrEnum("Color", {"RED": "red"}).RED, '"red"'),  # type: ignore[attr-defined]
        (Enum("Kind", {"A": 1}).A, "1"),  # type: ignore[attr-defined]
        (IntEnum("Level", {"LOW": 3}).LOW, "3"),  # type: ignore[attr-defined]
        (True, "true"),
    ],
)
def test_known_forms(value: Any, form: str) -> None:
    assert canonical_json(value) == form


def test_a_model_has_the_form_of_its_fields() -> None:
    class Model(BaseModel):
        b: int = 1
        a: str | None = None

    assert canonical_json(Model()) == '{"a":null,"b":1}'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), r"\$\.x\[1\]: nan"),
        (float("inf"), r"\$\.x\[1\]: inf"),
        ({1, 2}, r"\$\.x\[1\]: set"),
        (lambda: 1, r"\$\.x\[1\]: function"),
        (datetime(2026, 9, 1), "without a time zone"),
        (b"bytes", r"\$\.x\[1\]: bytes"),
        ({1: 2}, "the key 1 is not a string"),
        (object(), r"\$\.x\[1\]: object"),
        (np.float64("nan"), r"\$\.x\[1\]"),
        ("x\ud800", r"half a character"),
        ({"\udfff": 1}, r"half a character"),
        (np.zeros(2), r"\$\.x\[1\]: ndarray"),
        (np.float32(0.1), r"\$\.x\[1\]: float32"),
    ],
)
def test_what_has_no_stable_form_is_refused_by_its_place(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        canonical_json({"x": [0, value]})


def test_a_hash_is_the_same_in_every_process() -> None:
    """Python's own hashes differ between processes."""
    value = {"a": [1, 2.5, "x"], "b": None}
    code = f"from schemas.canonical import canonical_hash; print(canonical_hash({value!r}))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert there == canonical_hash(value)
    assert len(there) == 64


@given(st.lists(st.text(max_size=6) | st.integers(), min_size=1, max_size=4))
def test_a_seed_depends_on_every_part_and_where_it_stands(parts: list[Any]) -> None:
    seed = seed_from(*parts)
    assert 0 <= seed < 2**63
    assert seed == seed_from(*parts)
    assert seed_from(*parts, 0) != seed
    assert seed_from(*parts[:-1], [parts[-1]]) != seed


def test_joined_parts_make_another_seed() -> None:
    assert seed_from("a", "bc") != seed_from("ab", "c")


def test_known_seed() -> None:
    """A change would change every stored sample's seed."""
    assert seed_from(7, "t1", 0) == 5186698847255382645
