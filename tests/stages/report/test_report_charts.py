"""Charts and the numbers on them."""

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.report.charts import Bin, Dot, Series, bin_width, dot_chart, histogram, line_chart, shown
from stages.report.numbers import Share

NUMBER = st.floats(-1e9, 1e9, allow_nan=False)


def coordinates(svg: str) -> list[float]:
    root = ElementTree.fromstring(svg)
    width, height = (float(text) for text in root.attrib["viewBox"].split()[2:])
    found = []
    for element in root.iter():
        for names, limit in ((("cx", "x1", "x2", "x"), width), (("cy", "y1", "y2", "y"), height)):
            for name in names:
                if name in element.attrib:
                    value = float(element.attrib[name])
                    assert -1 <= value <= limit + 1, (element.tag, name, value)
                    found.append(value)
    return found


@given(ys=st.lists(st.one_of(st.none(), NUMBER), min_size=1, max_size=30), name=st.text(max_size=5))
@settings(deadline=None, max_examples=60)
def test_any_line_stays_inside_its_chart_and_is_well_formed(ys: list[float | None], name: str) -> None:
    name = "".join(letter for letter in name if letter.isprintable())
    chart = line_chart([Series(name, "a", list(enumerate(ys)))], label=name, x_label="i")
    if all(y is None for y in ys):
        assert "not measured" in chart
    else:
        assert coordinates(str(chart))
        assert chart.count("<circle") == sum(y is not None for y in ys)


@given(counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=24))
@settings(deadline=None, max_examples=40)
def test_any_histogram_stays_inside_its_chart(counts: list[int]) -> None:
    chart = histogram(
        [Bin(i, i + 1, [("n", "a", n), ("m", "bad", 1)]) for i, n in enumerate(counts)], label="", x_label=""
    )
    coordinates(str(chart))
    assert chart.count("<rect") == len(counts) + sum(n > 0 for n in counts)


@given(ys=st.lists(NUMBER, min_size=1, max_size=20))
@settings(deadline=None, max_examples=40)
def test_any_dots_stay_inside_their_chart(ys: list[float]) -> None:
    dots = [Dot(i, y, i + 1, (y - 1, y + 1)) for i, y in enumerate(ys)]
    coordinates(str(dot_chart(dots, label="", x_label="", x_bounds=(0, len(ys)))))


def test_a_gap_in_the_measurements_is_a_gap_in_the_line() -> None:
    chart = line_chart([Series("y", "a", [(0, 1), (1, 2), (2, None), (3, 4), (4, 5)])], label="", x_label="")
    assert chart.count("<polyline") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (3.0, "3"),
        (0.12345, "0.123"),
        (1234567, "1\u202f234\u202f567"),
        (12345.6, "12\u202f346"),
        (1e-6, "1e-6"),
        (-0.5, "-0.5"),
        (1e300, "1e300"),
    ],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(("largest", "width"), [(0, 1), (23, 1), (24, 2), (330, 20), (4096, 200)])
def test_columns_are_of_a_round_width(largest: int, width: int) -> None:
    assert bin_width(largest) == width
    assert math.ceil((largest + 1) / width) <= 24


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(8, 10, 0.490162, 0.943318), (0, 10, 0.0, 0.277533), (10, 10, 0.722467, 1.0), (5, 32, 0.068644, 0.317541)],
)
def test_wilson_interval(hits: int, trials: int, low: float, high: float) -> None:
    """Values of scipy's ``binomtest(…).proportion_ci(method="wilson")``."""
    assert Share(hits, trials).interval == pytest.approx((low, high), abs=1e-6)
    assert Share(0, 0).interval is None
    assert Share(0, 0).value is None
