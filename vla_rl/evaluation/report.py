"""One HTML file that shows a result: headline numbers, tables, curves, bars and clips; it loads nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vla_rl.contract.errors import ContractError
from vla_rl.contract.trust import write_whole
from vla_rl.evaluation import plots
from vla_rl.evaluation.plots import Bar, Point, Series, interval, number
from vla_rl.evaluation.stats import Rate
from vla_rl.evaluation.video import Clip, Recording
from vla_rl.pages import inline, render, templates

__all__ = [
    "Bar",
    "Cell",
    "Clip",
    "Point",
    "Recording",
    "Report",
    "Series",
    "Tile",
    "across_seeds",
    "mean_text",
    "percent",
]

Cell: TypeAlias = str | float | int | None


@dataclass(frozen=True)
class Tile:
    """One headline number with its interval; ``note`` says what it was measured on (episodes, seeds)."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    percent: bool = True
    note: str = ""
    tone: Literal["", "good", "bad"] = ""

    @classmethod
    def of(cls, name: str, rate: Rate, note: str = "", tone: Literal["", "good", "bad"] = "") -> Tile:
        return cls(name, rate.success, rate.low, rate.high, note=note, tone=tone)

    @property
    def has_range(self) -> bool:
        """Whether its interval is drawn on a scale from 0 to 100 %."""
        return self.percent and self.low is not None and self.high is not None and self.low >= 0


def percent(rate: Rate) -> str:
    """``84.0% [80.6, 86.9]``."""
    return f"{rate.success:.1%} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]"


def mean_text(mean: float, low: float | None, high: float | None) -> str:
    """``12.5 [11.9, 13.2]``, of mean returns."""
    if low is None or high is None:
        return f"{mean:.4g} (too few episodes for an interval)"
    return f"{mean:.4g} [{low:.4g}, {high:.4g}]"


def across_seeds(rates: Sequence[Rate]) -> list[str]:
    """Cells of a table: one training seed each, with its own interval, then mean, minimum and maximum."""
    values = [rate.success for rate in rates]
    mean = f"{sum(values) / len(values):.1%} ({min(values):.1%} to {max(values):.1%})"
    return [*map(percent, rates), mean]


class Report:
    """Collects the parts of a page in the order of the calls; :meth:`write` makes the file.

    Everything given is text and is escaped.  Figures that follow each other stand side by side where there is room.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title, self.subtitle = title, subtitle
        self._parts: list[tuple[bool, plots.Drawing]] = []

    def section(self, title: str, text: str = "") -> None:
        """A heading, and the paragraphs under it as in :meth:`text`."""
        self._add("heading", title=title)
        self.text(text)

    def text(self, text: str) -> None:
        """Paragraphs separated by empty lines; ``**bold**``, `` `code` `` and lists of ``- `` lines."""
        for block in filter(None, (block.strip() for block in re.split(r"\n\s*\n", text))):
            lines = [line.strip() for line in block.splitlines()]
            if all(line.startswith("- ") for line in lines):
                self._add("items", lines=[line[2:] for line in lines])
            else:
                self._add("paragraph", text=" ".join(lines))

    def command(self, command: str) -> None:
        """The command that produced the results above."""
        self._add("command", text=command)

    def tiles(self, tiles: Sequence[Tile]) -> None:
        """Headline numbers in a row."""
        self._add("tiles", tiles=tiles)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> None:
        """A table; columns of numbers (or of texts such as "84%") are set flush right, None is shown as a dash."""
        for row in rows:
            if len(row) != len(header):
                raise ContractError(
                    f"a row of table {caption or list(header)!r} has {len(row)} cells for {len(header)} columns, so it "
                    "cannot be read; give every row one cell per column."
                )
        right = [all(_is_number(row[i]) for row in rows) for i in range(len(header))]
        self._add("table", head=header, rows=rows, right=right, caption=caption)

    def curves(self, title: str, x_label: str, y_label: str, series: Sequence[Series], percent: bool = False) -> None:
        """Lines over a common x; ``percent`` is for rates: the y axis goes from 0 to 100 %."""
        self._parts.append((True, plots.curves(title, x_label, y_label, series, percent)))

    def bars(self, title: str, bars: Sequence[Bar], percent: bool = True) -> None:
        """Bars with interval whiskers, such as imitation against RL."""
        self._parts.append((True, plots.bars(title, bars, percent)))

    def scatter(self, title: str, x_label: str, y_label: str, points: Sequence[Point]) -> None:
        """Pairs of rates with their intervals around the diagonal, such as true and imagined success of policies."""
        self._parts.append((True, plots.scatter(title, x_label, y_label, points)))

    def videos(self, title: str, clips: Sequence[Clip | Recording]) -> None:
        """A grid of looping clips, framed green for a success and red for a failure."""
        if title:
            self._add("heading", title=title)
        self._add("clips", clips=list(map(_clip, clips)), wide=any(clip.wide for clip in clips))

    def _add(self, kind: str, **values: Any) -> None:
        self._parts.append((False, (kind, values)))

    def html(self) -> str:
        filters = {"number": number, "interval": interval, "cell": _cell}
        templates().filters.update(filters)
        sections = [(figures, [part for _, part in some]) for figures, some in groupby(self._parts, key=itemgetter(0))]
        return render("report.html", self.title, subtitle=self.subtitle, sections=sections)

    def write(self, path: str | Path) -> Path:
        """Write the page; a reader gets the old file or the new one, never a part of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.html().encode(), 0o644)
        return path


def _is_number(cell: Cell) -> bool:
    return not isinstance(cell, str) or re.fullmatch(r"[-+−–]?[\d.,]*\s?%?", cell) is not None


def _cell(cell: Cell) -> str:
    """What is shown of a cell, whose intervals stay on one line however narrow its column is."""
    if cell is None:
        return "–"
    if not isinstance(cell, str):
        return number(cell)
    return inline(re.sub(r"\[[^\]]*\]", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), cell))


def _clip(clip: Clip | Recording) -> dict[str, Any]:
    media = clip.media()
    tone, mark = {True: ("good", "✓"), False: ("bad", "✗"), None: ("", "")}[clip.success]
    source = f"data:{media.mime};base64,{base64.b64encode(media.data).decode('ascii')}"
    video = media.mime.startswith("video/")
    return {"label": clip.label, "source": source, "video": video, "tone": tone, "mark": mark}
