"""One HTML file that shows a result: headline numbers, tables, curves, bars and clips; it loads nothing else."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeAlias

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation import plots
from vla_rl.evaluation.plots import Bar, Point, Series, interval, number
from vla_rl.evaluation.stats import Rate
from vla_rl.evaluation.style import CSS, SCRIPT
from vla_rl.evaluation.video import Clip, Recording

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
# The browser loads nothing from outside, whatever the page contains.
_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


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
        """A success rate."""
        return cls(name, rate.success, rate.low, rate.high, note=note, tone=tone)


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
        self._parts: list[tuple[str, bool]] = []

    def section(self, title: str, text: str = "") -> None:
        """A heading, and the paragraphs under it as in :meth:`text`."""
        self._add(f"<h2>{escape(title)}</h2>")
        self.text(text)

    def text(self, text: str) -> None:
        """Paragraphs separated by empty lines; ``**bold**``, `` `code` `` and lists of ``- `` lines."""
        for block in filter(None, (block.strip() for block in re.split(r"\n\s*\n", text))):
            lines = [line.strip() for line in block.splitlines()]
            if all(line.startswith("- ") for line in lines):
                items = "".join(f"<li>{_inline(line[2:])}</li>" for line in lines)
                self._add(f'<ul class="text">{items}</ul>')
            else:
                self._add(f"<p>{_inline(' '.join(lines))}</p>")

    def command(self, command: str) -> None:
        """The command that produced the results above."""
        self._add(f"<pre>{escape(command)}</pre>")

    def tiles(self, tiles: Sequence[Tile]) -> None:
        """Headline numbers in a row."""
        self._add(f'<div class="tiles">{"".join(map(_tile, tiles))}</div>')

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> None:
        """A table; columns of numbers (or of texts such as "84%") are set flush right, None is shown as a dash."""
        for row in rows:
            if len(row) != len(header):
                raise ContractError(
                    f"a row of table {caption or list(header)!r} has {len(row)} cells for {len(header)} columns, so it "
                    "cannot be read; give every row one cell per column."
                )
        numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(header))]
        head = _cells("th", header, numeric)
        body = "".join(f"<tr>{_cells('td', row, numeric)}</tr>" for row in rows)
        note = f"<p>{_inline(caption)}</p>" if caption else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._add(f'<div class="card table">{table}{note}</div>')

    def curves(self, title: str, x_label: str, y_label: str, series: Sequence[Series], percent: bool = False) -> None:
        """Lines over a common x; ``percent`` is for rates: the y axis goes from 0 to 100 %."""
        self._add(plots.curves(title, x_label, y_label, series, percent), figure=True)

    def bars(self, title: str, bars: Sequence[Bar], percent: bool = True) -> None:
        """Bars with interval whiskers, such as imitation against RL."""
        self._add(plots.bars(title, bars, percent), figure=True)

    def scatter(self, title: str, x_label: str, y_label: str, points: Sequence[Point]) -> None:
        """Pairs of rates with their intervals around the diagonal, such as true and imagined success of policies."""
        self._add(plots.scatter(title, x_label, y_label, points), figure=True)

    def videos(self, title: str, clips: Sequence[Clip | Recording]) -> None:
        """A grid of looping clips, framed green for a success and red for a failure."""
        heading = f"<h2>{escape(title)}</h2>" if title else ""
        wide = any(clip.wide for clip in clips)
        self._add(f'{heading}<div class="clips{" wide" * wide}">{"".join(map(_clip, clips))}</div>')

    def _add(self, html: str, figure: bool = False) -> None:
        self._parts.append((html, figure))

    def html(self) -> str:
        """The page."""
        body = ""
        for figures, parts in groupby(self._parts, key=lambda part: part[1]):
            inner = "\n".join(html for html, _ in parts)
            body += f'<div class="row">{inner}</div>\n' if figures else f"{inner}\n"
        subtitle = f"<p>{_inline(self.subtitle)}</p>" if self.subtitle else ""
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
            f"<header><h1>{escape(self.title)}</h1>{subtitle}</header>\n<main>\n{body}</main>\n"
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page; a reader gets the old file or the new one, never a part of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(self.html(), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def _is_number(cell: Cell) -> bool:
    return not isinstance(cell, str) or re.fullmatch(r"[-+−–]?[\d.,]*\s?%?", cell) is not None


def _cells(tag: str, cells: Sequence[Cell], numeric: Sequence[bool]) -> str:
    def text(cell: Cell) -> str:
        if cell is None:
            return "–"
        return _inline(_whole(cell)) if isinstance(cell, str) else number(cell)

    return "".join(
        f"<{tag}{' class=n' if right else ''}>{text(cell)}</{tag}>" for cell, right in zip(cells, numeric, strict=True)
    )


def _whole(cell: str) -> str:
    """``cell``, whose intervals stay on one line however narrow its column is."""
    return re.sub(r"\[[^\]]*\]", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), cell)


def _tile(tile: Tile) -> str:
    bar = ""
    if tile.percent and tile.low is not None and tile.high is not None and tile.low >= 0:
        bar = (
            f'<div class="range"><i style="left:{100 * tile.low:.2f}%;width:{100 * (tile.high - tile.low):.2f}%"></i>'
            f'<b style="left:{100 * tile.value:.2f}%"></b></div>'
        )
    notes = [interval(tile.low, tile.high, tile.percent), _inline(tile.note)]
    return (
        f'<div class="card tile {tile.tone}"><span class="name">{_inline(tile.name)}</span>'
        f'<span class="value">{number(tile.value, tile.percent)}</span>{bar}'
        f'<span class="note">{"<br>".join(filter(None, notes))}</span></div>'
    )


def _clip(clip: Clip | Recording) -> str:
    media = clip.media()
    source = f"data:{media.mime};base64,{base64.b64encode(media.data).decode('ascii')}"
    label = escape(clip.label)
    if media.mime.startswith("video/"):
        picture = f'<video autoplay loop muted playsinline aria-label="{label}" src="{source}"></video>'
    else:
        picture = f'<img alt="{label}" src="{source}">'
    tone, mark = {True: ("good", "<b>✓</b> "), False: ("bad", "<b>✗</b> "), None: ("", "")}[clip.success]
    return f'<figure class="{tone}">{picture}<figcaption>{mark}{label}</figcaption></figure>'
