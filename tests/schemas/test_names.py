"""Names that become paths: none can leave the store."""

import re
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.names import checked_name


@pytest.mark.parametrize("name", ["demo", "gsm8k-2026.09_b", "7", "A" * 128, "a.b"])
def test_a_plain_name_is_itself(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc",
        "a\\b",
        "a=b",
        " a",
        "a b",
        ".a",
        "-a",
        "a..b",
        "a\n",
        "a\0",
        "é",
        "A" * 129,
    ],
)
def test_a_name_that_is_no_plain_segment_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run name .* cannot be used") as caught:
        checked_name(name, "run name")
    assert repr(name) in str(caught.value)


@given(st.text(max_size=20) | st.text(alphabet="./a=-_\\", max_size=8))
def test_whatever_is_accepted_stays_one_segment_below_the_store(name: str) -> None:
    try:
        checked_name(name)
    except ConfigError:
        return
    path = PurePosixPath("store") / name
    assert path.parts == ("store", name)
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
