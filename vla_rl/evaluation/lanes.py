"""A figure of lanes: what several processes did at the same time, as coloured spans over one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from vla_rl.evaluation.axes import axis_of, number, tick_text


@dataclass(frozen=True)
class Kind:
    """What a process may be doing; ``colour`` counts from 1, 0 is grey."""

    name: str
    colour: int

    @property
    def css(self) -> str:
        """The colour as a value of CSS."""
        return f"var(--c{self.colour})" if self.colour else "var(--grey)"


@dataclass(frozen=True)
class Lane:
    """One process; ``spans`` are (index of a kind, start, stop), in order of time and in the axis's seconds."""

    name: str
    spans: Sequence[tuple[int, float, float]]


def lanes_figure(title: str, kinds: Sequence[Kind], lanes: Sequence[Lane], start: float, stop: float) -> str:
    """The spans of ``lanes`` between ``start`` and ``stop``, s, a legend of the kinds that occur, and the axis.

    What lies outside is cut off; what is none of the kinds stays blank.
    """
    axis = axis_of(start, stop, 8, widen=False)
    clipped = [Lane(lane.name, _clipped(lane.spans, axis.low, axis.high)) for lane in lanes]
    seen = {kind for lane in clipped for kind, _, _ in lane.spans}
    legend = "".join(
        f'<li style="--c:{kind.css}"><i class="block"></i>{escape(kind.name)}</li>'
        for i, kind in enumerate(kinds)
        if i in seen
    )
    rows = "".join(_row(lane, kinds, [axis.at(edge) for _, *span in lane.spans for edge in span]) for lane in clipped)
    ticks = "".join(f'<span style="left:{axis.at(tick)}%">{tick_text(tick)}</span>' for tick in axis.ticks)
    return (
        f'<figure class="card lanes"><figcaption>{escape(title)}</figcaption><ul class="legend">{legend}</ul>{rows}'
        f'<div class="lane"><span></span><div class="lane-axis">{ticks}</div></div>'
        '<div class="x-label">seconds since the run began</div></figure>'
    )


def _clipped(spans: Sequence[tuple[int, float, float]], low: float, high: float) -> list[tuple[int, float, float]]:
    cut = [(kind, max(start, low), min(stop, high)) for kind, start, stop in spans]
    return [span for span in cut if span[2] > span[1]]


def _row(lane: Lane, kinds: Sequence[Kind], edges: Sequence[float]) -> str:
    """``edges`` are start and stop of each span, in percent."""
    paths = ""
    for i, kind in enumerate(kinds):
        d, seconds = "", 0.0
        for j, (index, start, stop) in enumerate(lane.spans):
            if index == i:
                left, right = edges[2 * j], edges[2 * j + 1]
                d += f"M{left} 0H{right}V10H{left}z"
                seconds += stop - start
        if d:
            said = f"{lane.name}: {kind.name} {number(seconds)} s"
            paths += f'<path style="--c:{kind.css}" d="{d}"><title>{escape(said)}</title></path>'
    return (
        f'<div class="lane"><span>{escape(lane.name)}</span><svg viewBox="0 0 100 10" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(lane.name)}">{paths}</svg></div>'
    )
