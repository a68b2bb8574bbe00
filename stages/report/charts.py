"""Charts as inline SVG that takes its colours from the page's style. Labels are escaped: they may come from a model.

Every mark has a tooltip with its numbers; colour never carries a meaning alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

_LEFT, _RIGHT, _TOP = 52.0, 14.0, 12.0


@dataclass(frozen=True)
class Series:
    """One line. ``tone`` is a colour class of the page's style: ``a`` to ``c``, ``good``, ``bad``, ``quiet``."""

    name: str
    tone: str
    points: Sequence[tuple[float, float | None]]
    """(x, y); None: not known, the line has a gap."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high), shaded."""


@dataclass(frozen=True)
class Bin:
    """One column of a histogram: values in ``[low, high)``, counted by what they are."""

    low: float
    high: float
    parts: Sequence[tuple[str, str, int]]
    """(name, tone, count), from the bottom up."""

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.parts)


@dataclass(frozen=True)
class _Frame:
    """The plotting area and its two scales."""

    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    y_ticks: Sequence[float]
    x_label: str

    @property
    def bottom(self) -> float:
        return self.height - (40.0 if self.x_label else 24.0)

    def at_x(self, value: float) -> float:
        return _LEFT + (value - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0) * (self.width - _LEFT - _RIGHT)

    def at_y(self, value: float) -> float:
        return self.bottom - (value - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - _TOP)


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    y_bounds: tuple[float, float] | None = None,
    width: int = 560,
    height: int = 260,
) -> Markup:
    """Lines over a common axis of whole numbers.

    Args:
        label: what the chart shows, for those who do not see it.
        y_bounds: None: the range of the values.
    """
    ys = [y for line in series for _, y in line.points if y is not None]
    ys += [bound for line in series for _, low, high in line.band for bound in (low, high)]
    xs = [x for line in series for x, _ in line.points]
    if not ys:
        return Markup('<p class="empty">not measured</p>')
    ticks = _ticks(*(y_bounds or (min(ys), max(ys))), 4)
    y_range = y_bounds or (min(ticks[0], min(ys)), max(ticks[-1], max(ys)))
    frame = _Frame(width, height, (min(xs), max(xs)), y_range, ticks, x_label)
    parts = [_axes(frame, _whole_ticks(min(xs), max(xs)))]
    for line in series:
        if line.band:
            edge = [(x, high) for x, _, high in line.band] + [(x, low) for x, low, _ in reversed(line.band)]
            parts.append(Markup('<polygon class="band {}" points="{}"/>').format(line.tone, _points(frame, edge)))
        parts += [
            Markup('<polyline class="line {}" points="{}"/>').format(line.tone, _points(frame, run))
            for run in _runs(line.points)
        ]
        parts += [
            Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}: {}</title></circle>').format(
                line.tone, frame.at_x(x), frame.at_y(y), 3 if len(line.points) <= 60 else 1.5, line.name, shown(y)
            )
            for x, y in line.points
            if y is not None
        ]
    return _svg(frame, label, parts)


def histogram(bins: Sequence[Bin], *, label: str, x_label: str, width: int = 560, height: int = 260) -> Markup:
    """Stacked columns."""
    ticks = _ticks(0, max((column.count for column in bins), default=0), 4)
    frame = _Frame(width, height, (bins[0].low, bins[-1].high), (0, max(ticks[-1], 1)), ticks, x_label)
    parts = [_axes(frame, _ticks(*frame.x, 6))]
    for column in bins:
        base = 0
        for name, tone, count in column.parts:
            if count:
                left, right = frame.at_x(column.low) + 0.5, frame.at_x(column.high) - 0.5
                top, bottom = frame.at_y(base + count), frame.at_y(base)
                parts.append(
                    Markup(
                        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                        "<title>{} to {}: {} {}</title></rect>"
                    ).format(
                        tone,
                        left,
                        top,
                        max(right - left, 0.5),
                        bottom - top,
                        shown(column.low),
                        shown(column.high),
                        count,
                        name,
                    )
                )
            base += count
    return _svg(frame, label, parts)


@dataclass(frozen=True)
class Dot:
    """A mean with its count, and where known the interval around it."""

    x: float
    y: float
    n: int
    interval: tuple[float, float] | None = None


def dot_chart(
    dots: Sequence[Dot],
    *,
    label: str,
    x_label: str,
    x_bounds: tuple[float, float],
    width: int = 560,
    height: int = 260,
) -> Markup:
    """Means over an axis, each as large as its count, with whiskers."""
    ys = [bound for dot in dots for bound in (dot.interval or (dot.y, dot.y))]
    ticks = _ticks(min(0.0, *ys), max(ys), 4)
    frame = _Frame(width, height, x_bounds, (min(ticks[0], *ys), max(ticks[-1], *ys)), ticks, x_label)
    parts = [_axes(frame, _ticks(*x_bounds, 6))]
    most = max(dot.n for dot in dots)
    for dot in dots:
        x = frame.at_x(dot.x)
        if dot.interval is not None:
            low, high = (frame.at_y(bound) for bound in dot.interval)
            parts.append(
                Markup('<line class="whisker a" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>').format(
                    x, low, high
                )
            )
        parts.append(
            Markup(
                '<circle class="dot a" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"><title>{} over {}</title></circle>'
            ).format(x, frame.at_y(dot.y), 2.5 + 4.5 * math.sqrt(dot.n / most), shown(dot.y), dot.n)
        )
    return _svg(frame, label, parts)


def shown(value: float | None) -> str:
    """A number for people: three significant digits, thousands apart; a dash where it is not known."""
    if value is None:
        return "–"
    if (value == round(value) or abs(value) >= 1000) and abs(value) < 1e15:
        return f"{value:,.0f}".replace(",", "\u202f")
    digits, e, exponent = f"{value:.3g}".partition("e")
    return digits + (f"e{int(exponent)}" if e else "")


def bin_width(largest: float, n_bins: int = 24) -> int:
    """The smallest of 1, 2, 5, 10, … with which whole numbers up to ``largest`` fall into ``n_bins`` or fewer bins."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if (largest + 1) / (step * factor) <= n_bins:
                return step * factor
        step *= 10


def _svg(frame: _Frame, label: str, parts: Sequence[Markup]) -> Markup:
    return Markup('<svg class="chart" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">{}</svg>').format(
        frame.width, frame.height, label, Markup("").join(parts)
    )


def _axes(frame: _Frame, x_ticks: Sequence[float]) -> Markup:
    left, right = _LEFT, frame.width - _RIGHT
    parts = [
        Markup(
            '<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>'
            '<text class="tick" text-anchor="end" x="{3}" y="{4:.1f}">{5}</text>'
        ).format(left, right, frame.at_y(y), left - 7, frame.at_y(y) + 3.5, shown(y))
        for y in frame.y_ticks
        if frame.y[0] <= y <= frame.y[1]
    ]
    parts += [
        Markup('<text class="tick" text-anchor="middle" x="{:.1f}" y="{}">{}</text>').format(
            frame.at_x(x), frame.bottom + 16, shown(x)
        )
        for x in x_ticks
        if frame.x[0] <= x <= frame.x[1]
    ]
    parts.append(
        Markup('<text class="axis" text-anchor="middle" x="{}" y="{}">{}</text>').format(
            (left + right) / 2, frame.height - 6, frame.x_label
        )
    )
    return Markup("").join(parts)


def _points(frame: _Frame, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{frame.at_x(x):.1f},{frame.at_y(y):.1f}" for x, y in points)


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if len(run) > 1]


def _ticks(low: float, high: float, n: int) -> list[float]:
    """About ``n`` round numbers that cover ``low`` to ``high``."""
    if high <= low:
        low, high = (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)
    raw = (high - low) / n
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 3 - math.floor(math.log10(step))
    return [round(index * step, digits) for index in range(first, last + 1)]


def _whole_ticks(low: float, high: float) -> list[float]:
    return [tick for tick in _ticks(low, high, 8) if tick == int(tick)] if high > low else [low]
