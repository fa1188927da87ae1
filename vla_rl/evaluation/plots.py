"""Figures of a report: what the template ``report.html`` draws as SVG, in percent of the figure's sides.

No plotting library: those whose figures answer to the pointer embed 1 to 4 MB of JavaScript into every page, where ours
are a few kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation.stats import Rate

Values: TypeAlias = Sequence[float] | np.ndarray
Drawing: TypeAlias = tuple[str, dict[str, Any]]  # a macro of report.html and what it draws
_COLOURS = 6  # --c1 ... and --grey in style.css
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
        return cls(label, rate.success, rate.low, rate.high, group, reference)


@dataclass(frozen=True)
class Point:
    """Two rates of one item with their intervals, such as a policy's true and imagined success."""

    name: str
    x: Rate
    y: Rate


def curves(title: str, x_label: str, y_label: str, series: Sequence[Series], percent: bool = False) -> Drawing:
    """Lines over a common x, with bands, a legend and the values under the pointer."""
    for line in series:
        _check(title, line)
    xs = [float(x) for line in series for x in line.x if math.isfinite(x)]
    if not xs:
        return "nothing", {"title": title, "what": y_label}
    parts = [part for line in series for part in (line.y, line.low, line.high) if part is not None]
    ys = [float(v) for part in parts for v in part if math.isfinite(v)]
    x = axis_of(min(xs), max(xs), 5, widen=False)
    y = axis_of(0.0, 1.0, 4) if percent else axis_of(min(ys, default=0.0), max(ys, default=1.0), 4)
    ranked = _colours([line.reference for line in series])
    colours = [line.colour or colour for line, colour in zip(series, ranked, strict=True)]
    return "plane", {
        "title": title,
        "x_label": x_label,
        "y_label": y_label,
        "x_ticks": x.labels(False),
        "y_ticks": y.labels(percent),
        "lines": [_line(line, colour, x, y) for line, colour in zip(series, colours, strict=True)],
        "crosses": [],
        "legend": len(series) > 1,
        "data": {"x": [x.low, x.high], "percent": percent, "series": list(map(_data, series, colours))},
    }


def scatter(title: str, x_label: str, y_label: str, points: Sequence[Point]) -> Drawing:
    """One point per item, from two rates with their intervals, and the diagonal of equal rates."""
    if not points:
        return "nothing", {"title": title, "what": y_label}
    ticks = axis_of(0.0, 1.0, 4).labels(True)
    series = [Series(one.name, [one.x.success], [one.y.success], [one.y.low], [one.y.high]) for one in points]
    diagonal = {"colour": "var(--grey)", "dashed": True, "band": "", "path": "M0 100L100 0", "dots": ""}
    shown = [_data(item, "var(--c1)") for item in series]
    return "plane", {
        "title": title,
        "x_label": x_label,
        "y_label": y_label,
        "x_ticks": ticks,
        "y_ticks": ticks,
        "lines": [diagonal],
        "crosses": [_cross(point) for point in points],
        "legend": False,
        "data": {"x": [0.0, 1.0], "percent": True, "x_percent": True, "series": shown},
    }


def bars(title: str, entries: Sequence[Bar], percent: bool = True) -> Drawing:
    """Horizontal bars with whiskers, one row each."""
    ends = [v for bar in entries for v in (bar.value, bar.low, bar.high) if v is not None and math.isfinite(v)]
    axis = axis_of(0.0, 1.0, 4) if percent else axis_of(min([0.0, *ends]), max([0.0, *ends]), 4)
    # Without groups every label occurs once, so colours would carry no information.
    grouped = any(bar.group for bar in entries)
    kinds = [bar.label if grouped else str(bar.reference) for bar in entries]
    references = {kind: bar.reference for kind, bar in zip(kinds, entries, strict=True)}
    colours = dict(zip(references, _colours(list(references.values())), strict=True))
    rows = [(bar.group, _bar(bar, axis, percent, colours[kind])) for kind, bar in zip(kinds, entries, strict=True)]
    groups = [
        {"name": name, "bars": [row for _, row in some]} for name, some in groupby(rows, key=lambda named: named[0])
    ]
    return "bars", {"title": title, "groups": groups, "ticks": axis.labels(percent)}


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


def _cross(point: Point) -> dict[str, str]:
    """A dot, and a whisker along each axis."""
    x, x_low, x_high = (round(100 * value, 3) for value in (point.x.success, point.x.low, point.x.high))
    y, y_low, y_high = (round(100 - 100 * value, 3) for value in (point.y.success, point.y.low, point.y.high))
    return {"whiskers": f"M{x_low} {y}H{x_high}M{x} {y_low}V{y_high}", "dot": f"M{x} {y}h0"}


def _line(line: Series, colour: str, x: Axis, y: Axis) -> dict[str, Any]:
    runs = _runs(line.x, line.y, x=x, y=y)
    marks = [point for run in runs if len(line.x) <= _MOST_MARKERS or len(run) == 1 for point in run]
    band = ""
    if line.low is not None and line.high is not None:
        for run in _runs(line.x, line.low, line.high, x=x, y=y):
            edge = [f"{a} {high}" for a, _, high in run] + [f"{a} {low}" for a, low, _ in reversed(run)]
            band += "M" + "L".join(edge) + "Z"
    return {
        "name": line.name,
        "colour": colour,
        "dashed": line.reference,
        "band": band,
        "path": "".join("M" + "L".join(f"{a} {b}" for a, b in run) for run in runs),
        "dots": "" if line.reference else "".join(f"M{a} {b}h0" for a, b in marks),
    }


def _runs(xs: Values, *heights: Values, x: Axis, y: Axis) -> list[list[tuple[float, ...]]]:
    """(x, one or two y) of every point as drawn, cut where one is not finite."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for at, *values in zip(xs, *heights, strict=True):
        if math.isfinite(at + sum(values)):
            runs[-1].append((x.at(at), *(round(100 - y.at(value), 3) for value in values)))
        else:
            runs.append([])
    return [run for run in runs if run]


def _data(line: Series, colour: str) -> dict[str, object]:
    """What the pointer is told; None where there is a gap."""

    def short(values: Values) -> list[float | None]:
        return [float(f"{v:.8g}") if math.isfinite(v) else None for v in values]

    band = {"low": short(line.low), "high": short(line.high)} if line.low is not None and line.high is not None else {}
    return {"name": line.name, "colour": colour, "x": short(line.x), "y": short(line.y), **band}


def _bar(bar: Bar, axis: Axis, percent: bool, colour: str) -> dict[str, Any]:
    zero = axis.at(0.0)
    end = axis.at(bar.value) if math.isfinite(bar.value) else None
    known = bar.low is not None and bar.high is not None and math.isfinite(bar.low + bar.high)
    return {
        "label": bar.label,
        "colour": colour,
        "left": None if end is None else min(zero, end),
        "width": None if end is None else abs(end - zero),
        "whisker": [axis.at(bar.low), axis.at(bar.high)] if known else None,  # type: ignore[arg-type]
        "value": number(bar.value, percent),
        "interval": interval(bar.low, bar.high, percent),
    }


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``, with a tick at each of ``ticks``; all in the units of the data."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return round(100.0 * (value - self.low) / (self.high - self.low), 3)

    def labels(self, percent: bool) -> list[dict[str, Any]]:
        """Where the ticks are, and their texts."""
        texts = [f"{100 * tick:.4g}%" if percent else number(round(tick, 12)) for tick in self.ticks]
        return [{"at": self.at(tick), "text": text} for tick, text in zip(self.ticks, texts, strict=True)]


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
