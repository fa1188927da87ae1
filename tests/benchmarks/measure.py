"""Fair timing of two or more implementations of the same work, and the rows of the results."""

from __future__ import annotations

import gc
import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from vla_rl.training.tracking import write_json

COMMAND = "OMP_NUM_THREADS=1 python -m tests.benchmarks"


class NotRun(Exception):
    """Something that a benchmark needs is not there; the text says what, and how it is had."""


@dataclass(frozen=True)
class Row:
    """One measurement: ``ratio`` > 1 means that ours is better; both are None for parts of a whole.

    ``detail``: sizes, and the measurements of the other side's slower settings.
    """

    name: str
    ours: float
    other: float | None
    ratio: float | None
    unit: str
    command: str
    detail: dict[str, Any] = field(default_factory=dict)


class Contender(NamedTuple):
    """``run`` is timed, ``prepare`` before it is not."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def interleave(contenders: Mapping[str, Contender], repeats: int) -> dict[str, float]:
    """Median seconds of each contender; they take turns, so that a drift of the machine affects all of them.

    Every contender runs once before anything is counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, contender in contenders.items():
            contender.prepare()
            start = time.perf_counter()
            contender.run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def rate_row(name: str, group: str, amounts: float, seconds: tuple[float, float], unit: str, **detail: Any) -> Row:
    """A row in things per second, from the seconds that ours and the other took for ``amounts`` things."""
    ours, other = (amounts / value for value in seconds)
    return Row(name, ours, other, ours / other, unit, f"{COMMAND} {group}", detail)


def time_row(name: str, group: str, seconds: tuple[float, float], **detail: Any) -> Row:
    """A row in milliseconds."""
    ours, other = (1e3 * value for value in seconds)
    return Row(name, ours, other, other / ours, "ms", f"{COMMAND} {group}", detail)


class OverBudget(Exception):
    """A benchmark took longer than its budget."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OverBudget in the main thread when the block takes longer."""

    def stop(number: int, frame: Any) -> None:
        raise OverBudget

    before = signal.signal(signal.SIGUSR1, stop)
    main_thread = threading.main_thread().ident or 0
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main_thread, signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@dataclass(frozen=True)
class Line:
    """One result on a GPU, or why there is none (``value`` None); ``aim`` is at most (ms) or at least (others)."""

    part: str
    what: str
    value: float | None
    unit: str = ""
    aim: str = ""
    note: str = ""

    def __str__(self) -> str:
        value = "none" if self.value is None else f"{self.value:,.4g} {self.unit}".rstrip()
        return f"| {' | '.join((self.part, self.what, value, self.aim, self.note))} |"


class Report:
    """The lines so far, in ``name.json`` and ``name.md`` of ``out`` after each; ``about`` is said with the device."""

    def __init__(self, out: Path, name: str, device: str, **about: Any) -> None:
        self.files, self.cuda, self.lines, self.parts = out / name, device != "cpu", list[Line](), list[str]()
        self.about = {
            "device": torch.cuda.get_device_name() if self.cuda else f"cpu ({platform.machine()})",
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **about,
        }
        out.mkdir(parents=True, exist_ok=True)

    def resume(self) -> None:
        """Keep what an earlier report of the same device found: :attr:`parts` are those that need not run again."""
        if (file := self.files.with_suffix(".json")).exists():
            before = json.loads(file.read_text(encoding="utf-8"))
            if all(before["about"].get(name) == self.about[name] for name in self.about.keys() - {"date"}):
                self.parts = before["parts"]
                self.lines = [Line(**line) for line in before["lines"] if line["value"] is not None]

    def heading(self) -> str:
        """The line above the table."""
        small = "" if self.cuda else "There is no GPU: no number says how fast a GPU is. "
        device, date, version, python = list(self.about.values())[:4]
        return f"{small}{device}, {date}, torch {version}, Python {python}."

    def add(self, *lines: Line) -> None:
        """Print and write."""
        for line in lines:
            self.lines.append(line)
            print(line, flush=True)
        written = {"about": self.about, "parts": self.parts, "lines": [asdict(line) for line in self.lines]}
        write_json(self.files.with_suffix(".json"), written)
        head = [self.heading(), "", "| part | what | value | aim | note |", "|---|---|---|---|---|"]
        self.files.with_suffix(".md").write_text("\n".join([*head, *map(str, self.lines)]) + "\n", encoding="utf-8")

    def run(self, name: str, part: Callable[[], Sequence[Line] | None], seconds: float) -> None:
        """Add the lines of a part; that it fails, or takes longer than ``seconds``, is a line, and the others go on."""
        try:
            with at_most(seconds):
                found = part() or ()
            self.parts.append(name)
            self.add(*found)
        except OverBudget:
            self.add(Line(name, "", None, note=f"not finished after {seconds:.0f} s"))
        except NotRun as reason:
            self.add(Line(name, "", None, note=str(reason)))
        except Exception as error:  # the other parts still tell something
            said = " ".join(str(error).split()).replace("|", "/")[:300]
            self.add(Line(name, "", None, note=f"failed: {type(error).__name__}: {said}"))
        torch.compiler.reset()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
