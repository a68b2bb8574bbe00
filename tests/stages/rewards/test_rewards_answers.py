"""Finding answers in text: stated examples, and promises that hold for any text."""

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.rewards.answers import extracted, last_boxed, last_number, number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16 - 3 - 4 = 9.", "9"),
        ("5-3", "3"),
        ("it is -3", "-3"),
        ("(-7)", "-7"),
        ("$1,234,567.89!", "$1,234,567.89"),
        ("-$5 in all", "-$5"),
        ("3/4 of it", "3/4"),
        ("about .5", ".5"),
        ("1e3", "1e3"),
        ("minus \u22122", "\u22122"),
        ("12,34", "34"),
        ("none at all", None),
        ("", None),
    ],
)
def test_last_number_as_written(text: str, expected: str | None) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$1,234.50", Decimal("1234.5")),
        ("3/4", Decimal("0.75")),
        ("50%", Decimal(50)),
        ("18 dollars", Decimal(18)),
        ("\u22122", Decimal(-2)),
        ("3 or 4", None),
        ("1/0", None),
        ("1e99999999999999999999", None),
        ("four", None),
    ],
)
def test_number_reads_one_number_and_no_other_text(text: str, expected: Decimal | None) -> None:
    assert number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox {x}", "x"),
        (r"\boxed{1} and then \boxed{2", "1"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"{ \boxed{3}", "3"),
        ("box{1}", None),
    ],
)
def test_last_complete_box(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def test_marker_takes_the_rest_of_its_last_line() -> None:
    assert extracted("#### 3\nno: #### 4 apples\nbye", "marker") == "4 apples"
    assert extracted("no marker 4", "marker") is None
    assert extracted("#### \n5", "marker") == "5"
    assert extracted("A: 1 A: 2", "marker", marker="A:") == "2"


def test_pattern_takes_the_first_group_of_its_last_match() -> None:
    assert extracted("answer: a, answer: b.", "regex", pattern=r"answer: (\w)") == "b"
    assert extracted("x1 x2", "regex", pattern=r"x\d") == "x2"
    assert extracted("x", "regex", pattern=r"y") is None


@given(st.text(alphabet="0123456789.,-+/$eE% x\\{}boxed#", max_size=60))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    for method in ("text", "last_number", "marker", "boxed"):
        answer = extracted(text, method)
        assert answer is None or answer == answer.strip() != ""
        assert answer is None or answer in text
        number(answer or "")


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_a_number_survives_its_thousands_separators(value: Decimal) -> None:
    assert number(f"${value:,}" if value >= 0 else f"-${-value:,}") == value
    assert last_number(f"so 1 + 1 is {value:,}.") == f"{value:,}"


@pytest.mark.parametrize(("part", "times"), [("\\boxed{", 50_000), ("1,", 100_000), ("9", 200_000), ("-$", 100_000)])
def test_hostile_text_takes_linear_time(part: str, times: int) -> None:
    """Eight times the text takes eight times the work, and not eight times that."""
    assert work_s(part * times) < 30 * work_s(part * (times // 8))


def work_s(text: str) -> float:
    """Processor time of this thread, whatever else the machine does."""
    found = []
    for _ in range(3):
        began = time.thread_time()
        for method in ("last_number", "marker", "boxed"):
            number(extracted(text, method) or "")
        found.append(time.thread_time() - began)
    return min(found)
