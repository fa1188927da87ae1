"""Axes of a figure: round ticks, numbers as people read them, and the plane between two axes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape


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
