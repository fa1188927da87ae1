"""Figures of a report as HTML with inline SVG, drawn without a plotting library.

The SVG of a curve is scaled to its box and all text is HTML beside it, so the font size is the same on a desktop and on
a phone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias, TypeVar

import numpy as np

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation.stats import Rate

Values: TypeAlias = Sequence[float] | np.ndarray
_Point = TypeVar("_Point")
_COLOURS = 6  # --c1 ... and --grey in style.py
_MOST_MARKERS = 40  # more dots would hide the line


@dataclass(frozen=True)
class Series:
    """One line; ``low`` and ``high`` are its band, a non-finite value is a gap, a ``reference`` is dashed and grey.

    ``colour``, a value of CSS, is for what has a colour of its own on the page.
    """

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    reference: bool = False
    colour: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar with its interval; bars of a ``group`` stand together.

    A ``label`` keeps its colour over the groups; a ``reference`` (what the others are compared with) is grey.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    group: str = ""
    reference: bool = False

    @classmethod
    def of(cls, label: str, rate: Rate, group: str = "", reference: bool = False) -> Bar:
        """A success rate."""
        return cls(label, rate.success, rate.low, rate.high, group, reference)


@dataclass(frozen=True)
class Point:
    """Two rates of one item with their intervals, such as a policy's true and imagined success."""

    name: str
    x: Rate
    y: Rate


def curves(title: str, x_label: str, y_label: str, series: Sequence[Series], percent: bool = False) -> str:
    """Lines over a common x, with bands, a legend and the values under the pointer."""
    for line in series:
        _check(title, line)
    xs = [float(x) for line in series for x in line.x if math.isfinite(x)]
    if not xs:
        return _figure(title, f'<p class="empty">No data yet for {escape(y_label)}.</p>')
    parts = [part for line in series for part in (line.y, line.low, line.high) if part is not None]
    ys = [float(v) for part in parts for v in part if math.isfinite(v)]
    x = axis_of(min(xs), max(xs), 5, widen=False)
    y = axis_of(0.0, 1.0, 4) if percent else axis_of(min(ys, default=0.0), max(ys, default=1.0), 4)
    ranked = _colours([line.reference for line in series])
    colours = [line.colour or colour for line, colour in zip(series, ranked, strict=True)]
    lines = "".join(_line(line, colour, x, y) for line, colour in zip(series, colours, strict=True))
    data = {"x": [x.low, x.high], "percent": percent, "series": list(map(_data, series, colours))}
    plane = Plane(title, x_label, y_label, x, y, percent=percent)
    return _figure(title, _legend(series, colours) + plane.html(lines, data))


def scatter(title: str, x_label: str, y_label: str, points: Sequence[Point]) -> str:
    """One point per item, from two rates with their intervals, and the diagonal of equal rates."""
    if not points:
        return _figure(title, f'<p class="empty">No data yet for {escape(y_label)}.</p>')
    axis = axis_of(0.0, 1.0, 4)
    series = [
        Series(point.name, [point.x.success], [point.y.success], [point.y.low], [point.y.high]) for point in points
    ]
    shown = [_data(item, "var(--c1)") for item in series]
    data = {"x": [0.0, 1.0], "percent": True, "x_percent": True, "series": shown}
    diagonal = '<g style="--c:var(--grey)"><path class="line dashed" d="M0 100L100 0"/></g>'
    plane = Plane(title, x_label, y_label, axis, axis, percent=True, x_percent=True)
    return _figure(title, plane.html(diagonal + "".join(map(_cross, points)), data))


def bars(title: str, entries: Sequence[Bar], percent: bool = True) -> str:
    """Horizontal bars with whiskers, one row each."""
    ends = [v for bar in entries for v in (bar.value, bar.low, bar.high) if v is not None and math.isfinite(v)]
    axis = axis_of(0.0, 1.0, 4) if percent else axis_of(min([0.0, *ends]), max([0.0, *ends]), 4)
    # Without groups every label occurs once, so colours would carry no information.
    grouped = any(bar.group for bar in entries)
    kinds = [bar.label if grouped else str(bar.reference) for bar in entries]
    references = {kind: bar.reference for kind, bar in zip(kinds, entries, strict=True)}
    colours = dict(zip(references, _colours(list(references.values())), strict=True))
    rows, group = [], ""
    for kind, bar in zip(kinds, entries, strict=True):
        if bar.group != group:
            group = bar.group
            rows.append(f'<div class="bar-group">{escape(group)}</div>')
        rows.append(_bar(bar, axis, percent, colours[kind]))
    ticks = "".join(f'<span style="left:{axis.at(tick)}%">{tick_text(tick, percent)}</span>' for tick in axis.ticks)
    return _figure(title, f'<div class="bars">{"".join(rows)}<div class="bar-axis"><div>{ticks}</div></div></div>')


def _figure(title: str, body: str) -> str:
    return f'<figure class="card"><figcaption>{escape(title)}</figcaption>{body}</figure>'


def _check(title: str, line: Series) -> None:
    lengths = {len(part) for part in (line.x, line.y, line.low, line.high) if part is not None}
    if len(lengths) != 1 or (line.low is None) != (line.high is None):
        raise ContractError(
            f"series {line.name!r} of figure {title!r} has parts of lengths {sorted(lengths)} or half a band, so it "
            "cannot be drawn; give x, y and, for a band, both low and high, all of one length."
        )


def _colours(references: Sequence[bool]) -> list[str]:
    """One colour per item; references are grey and take no colour."""
    ranks = np.cumsum(~np.asarray(references, dtype=bool)) - 1
    return [
        "var(--grey)" if grey else f"var(--c{rank % _COLOURS + 1})"
        for grey, rank in zip(references, ranks, strict=True)
    ]


def _cross(point: Point) -> str:
    """A dot, and a whisker along each axis."""
    x, x_low, x_high = (round(100 * value, 3) for value in (point.x.success, point.x.low, point.x.high))
    y, y_low, y_high = (round(100 - 100 * value, 3) for value in (point.y.success, point.y.low, point.y.high))
    return (
        f'<g style="--c:var(--c1)"><path class="cross" d="M{x_low} {y}H{x_high}M{x} {y_low}V{y_high}"/>'
        f'<path class="dots" d="M{x} {y}h0"/></g>'
    )


def _line(line: Series, colour: str, x: Axis, y: Axis) -> str:
    points = [
        (x.at(a), round(100 - y.at(b), 3)) if math.isfinite(a + b) else None
        for a, b in zip(line.x, line.y, strict=True)
    ]
    runs = _runs(points)
    d = "".join("M" + "L".join(f"{a} {b}" for a, b in run) for run in runs)
    marks = [point for run in runs if len(points) <= _MOST_MARKERS or len(run) == 1 for point in run]
    dots = "" if line.reference else "".join(f"M{a} {b}h0" for a, b in marks)
    return (
        f'<g style="--c:{colour}"><path class="band" d="{_band(line, x, y)}"/>'
        f'<path class="line{" dashed" if line.reference else ""}" d="{d}"/><path class="dots" d="{dots}"/></g>'
    )


def _band(line: Series, x: Axis, y: Axis) -> str:
    if line.low is None or line.high is None:
        return ""
    rows = [
        (x.at(a), round(100 - y.at(low), 3), round(100 - y.at(high), 3)) if math.isfinite(a + low + high) else None
        for a, low, high in zip(line.x, line.low, line.high, strict=True)
    ]
    path = ""
    for run in _runs(rows):
        edge = [f"{a} {high}" for a, _, high in run] + [f"{a} {low}" for a, low, _ in reversed(run)]
        path += "M" + "L".join(edge) + "Z"
    return path


def _runs(points: Sequence[_Point | None]) -> list[list[_Point]]:
    """Cut at the gaps."""
    runs: list[list[_Point]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def _data(line: Series, colour: str) -> dict[str, object]:
    def short(values: Values) -> list[float | None]:
        return [float(f"{v:.8g}") if math.isfinite(v) else None for v in values]

    band = {"low": short(line.low), "high": short(line.high)} if line.low is not None and line.high is not None else {}
    return {"name": line.name, "colour": colour, "x": short(line.x), "y": short(line.y), **band}


def _legend(series: Sequence[Series], colours: Sequence[str]) -> str:
    if len(series) == 1:
        return ""
    items = "".join(
        f'<li style="--c:{colour}"><i{" class=dashed" if line.reference else ""}></i>{escape(line.name)}</li>'
        for line, colour in zip(series, colours, strict=True)
    )
    return f'<ul class="legend">{items}</ul>'


def _bar(bar: Bar, axis: Axis, percent: bool, colour: str) -> str:
    text = f"<b>{number(bar.value, percent)}</b> {interval(bar.low, bar.high, percent)}"
    zero = axis.at(0.0)
    shape = ""
    if math.isfinite(bar.value):
        end = axis.at(bar.value)
        shape = f'<rect x="{min(zero, end)}%" width="{abs(end - zero)}%" y="0" height="100%" rx="3"/>'
    if bar.low is not None and bar.high is not None and math.isfinite(bar.low + bar.high):
        low, high = axis.at(bar.low), axis.at(bar.high)
        ends = "".join(f'<line x1="{at}%" x2="{at}%" y1="25%" y2="75%"/>' for at in (low, high))
        shape += f'<g class="whisker"><line x1="{low}%" x2="{high}%" y1="50%" y2="50%"/>{ends}</g>'
    return (
        f'<div class="bar" style="--c:{colour}"><span>{escape(bar.label)}</span>'
        f'<svg role="img" aria-label="{escape(bar.label)}">{shape}</svg><span class="value">{text}</span></div>'
    )


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``, with a tick at each of ``ticks``; all in the units of the data."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Position on the axis in percent."""
        return round(100.0 * (value - self.low) / (self.high - self.low), 3)


@dataclass(frozen=True)
class Plane:
    """Two axes with ticks and labels; drawings between them have percent coordinates."""

    title: str
    x_label: str
    y_label: str
    x: Axis
    y: Axis
    percent: bool  # of y
    x_percent: bool = False

    def html(self, drawn: str, data: dict[str, object]) -> str:
        """``drawn`` is SVG; ``data`` are the values of the tooltip."""
        grid = "".join(f'<path class="grid" d="M0 {100 - self.y.at(tick)}H100"/>' for tick in self.y.ticks)
        y_text = [tick_text(tick, self.percent) for tick in self.y.ticks]
        y_ticks = "".join(
            f'<span style="bottom:{self.y.at(tick)}%">{text}</span>'
            for tick, text in zip(self.y.ticks, y_text, strict=True)
        )
        x_ticks = "".join(
            f'<span style="left:{self.x.at(tick)}%">{tick_text(tick, self.x_percent)}</span>' for tick in self.x.ticks
        )
        return (
            f'<div class="y-label">{escape(self.y_label)}</div><div class="plot">'
            f'<div class="y-ticks" style="width:{max(map(len, y_text))}ch">{y_ticks}</div>'
            f'<div class="area" data-chart="{escape(json.dumps(data))}"><svg viewBox="0 0 100 100" '
            f'preserveAspectRatio="none" role="img" aria-label="{escape(self.title)}">{grid}{drawn}</svg>'
            '<div class="guide"></div><div class="tip"></div></div>'
            f'<div class="x-ticks">{x_ticks}</div><div class="x-label">{escape(self.x_label)}</div></div>'
        )


def number(value: float, percent: bool = False) -> str:
    """A number as people read it: ``84.2%``, ``1.5M``, ``25k``, ``0.0123``, and a dash if it is not finite."""
    if not math.isfinite(value):
        return "–"
    if percent:
        return f"{100 * value:.1f}%"
    for threshold, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= threshold:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def interval(low: float | None, high: float | None, percent: bool = False) -> str:
    """``[77.1%, 89.3%]``, or nothing."""
    return "" if low is None or high is None else f"[{number(low, percent)}, {number(high, percent)}]"


def axis_of(low: float, high: float, about: int, widen: bool = True) -> Axis:
    """About ``about`` round ticks; ``widen`` moves the ends out to ticks, otherwise the ends are the data's."""
    if high <= low:
        low, high = low - (abs(low) or 1.0) / 2, low + (abs(low) or 1.0) / 2
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if size * m >= raw * 0.999)
    slack = 1e-9  # an end that is a tick but for rounding counts as one
    if widen:
        first, last = math.floor(low / step + slack), math.ceil(high / step - slack)
    else:
        first, last = math.ceil(low / step - slack), math.floor(high / step + slack)
    ticks = tuple(step * i for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks) if widen else Axis(low, high, ticks)


def tick_text(value: float, percent: bool = False) -> str:
    """The label of a tick."""
    return f"{100 * value:.4g}%" if percent else number(round(value, 12))
