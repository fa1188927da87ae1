"""How an arm does, on the terminal: a line that is renewed while it moves, a line for every episode that is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol, Self

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from robot_drivers.record import Record
from vla_rl.recipes.terminal import bar

_RECENT = 50  # control steps that the rate and the share of clipped ones are of
_COLORS = {"policy": "cyan", "human": "green", "safety": "red", "hold": "dim"}


class StatusLine:
    """One line about the newest control steps, on a terminal only; a context manager."""

    def __init__(self, show: Console, title: str = "") -> None:
        self._title = title
        self._live = Live(console=show, transient=True, auto_refresh=True, redirect_stdout=False)
        self._captured: deque[float] = deque(maxlen=_RECENT)
        self._clipped: deque[bool] = deque(maxlen=_RECENT)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, record: Record, stopped: str = "") -> None:
        """Show the control step ``record``; ``stopped`` is why the arm is stopped, "" while it is not."""
        self._captured.append(record.captured)
        self._clipped.append(bool(np.any(record.clipped)))
        self._live.update(self.text(record, stopped))

    def text(self, record: Record, stopped: str) -> Text:
        """Who moves the arm, what of it was clipped, how often it is measured, and why it is stopped."""
        span = self._captured[-1] - self._captured[0]
        rate = f"{(len(self._captured) - 1) / span:.1f} Hz" if span > 0 else ""
        clipped = f"clipped {np.mean(self._clipped):.0%}"
        reason = f"({record.reason})" if record.reason and not stopped else ""
        parts = (
            (self._title, "bold"),
            (record.source, _COLORS[record.source]),
            (" ".join((clipped, reason)).strip(), ""),
            (rate, ""),
            (f"STOPPED: {stopped}" if stopped else "", "bold red"),
        )
        return Text("   ").join(Text(words, style) for words, style in parts if words)


class Display(Protocol):
    """What is shown of episodes; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def step(self, title: str, record: Record, stopped: str) -> None:
        """A control step of the episode ``title`` was made."""

    def ended(self, title: str, records: Sequence[Record], done: int, succeeded: int) -> None:
        """The episode is over; ``done`` episodes count, ``succeeded`` of them as successes."""


class EpisodeBar:
    """A bar: episodes that are over in no time."""

    def __init__(self, show: Console, total: int) -> None:
        self._total = total
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._update = self._opened.enter_context(bar("robot", self._total))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def step(self, title: str, record: Record, stopped: str) -> None:
        """Too quick to be seen."""

    def ended(self, title: str, records: Sequence[Record], done: int, succeeded: int) -> None:
        self._update(done, f"{succeeded} succeeded")


class EpisodeLines:
    """A status line while an episode lasts, and a line that stays when it is over."""

    def __init__(self, show: Console, total: int) -> None:
        self._show, self._line = show, ExitStack()
        self._status: StatusLine | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def step(self, title: str, record: Record, stopped: str) -> None:
        if self._status is None:
            self._status = self._line.enter_context(StatusLine(self._show, title))
        self._status.update(record, stopped)

    def ended(self, title: str, records: Sequence[Record], done: int, succeeded: int) -> None:
        self._line.close()
        self._status = None
        if not records:
            self._show.print(Text(f"{title}: fault, before its first control step"))
            return
        person = np.mean([record.intervened for record in records])
        clipped = np.mean([bool(np.any(record.clipped)) for record in records])
        last = records[-1]
        outcome = last.outcome or "fault"
        stopped = ", with the arm stopped" if last.reason == "stopped" else ""
        self._show.print(
            Text(
                f"{title}: {outcome}, {last.captured - records[0].captured:.1f} s, {person:.0%} a person's, "
                f"{clipped:.0%} clipped{stopped}"
            )
        )


class CommandLines:
    """A line for every command: when, by whom, each joint's target, and in brackets what was asked for instead."""

    def __init__(self, show: Console, names: Sequence[str]) -> None:
        self._show, self._names = show, [name.removesuffix(".pos") for name in names]
        self._began = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def step(self, title: str, record: Record, stopped: str) -> None:
        """Print the command."""
        self._began = self._began or record.captured
        asked = np.isfinite(record.requested) & record.clipped
        targets = (
            f"{name} {target:+.3f}" + (f" [{wanted:+.3f}]" if differs else "")
            for name, target, wanted, differs in zip(self._names, record.executed, record.requested, asked, strict=True)
        )
        reason = f"  ({stopped or record.reason})" if stopped or record.reason else ""
        line = f"{record.captured - self._began:7.3f} s  {record.source:6}  {'  '.join(targets)}{reason}"
        self._show.print(Text(line), soft_wrap=True)

    def ended(self, title: str, records: Sequence[Record], done: int, succeeded: int) -> None:
        """Say so, and begin to count anew."""
        self._began = 0.0
        self._show.print(Text(f"{title}: over after {len(records)} commands, none of which was sent"))
