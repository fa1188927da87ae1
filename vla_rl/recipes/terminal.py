"""A run and the person at its terminal: progress, where the time goes, and being asked to stop."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vla_rl.contract.errors import Terminated

console = Console(stderr=True, highlight=False, soft_wrap=True)  # a path that is cut by lines cannot be copied


def standard_output() -> Console:
    """For tables and trees: as wide as a terminal, and as wide as they need in a file or a pipe, which one searches."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar for ``total`` things; call the result with how many are done and a short remark (rate, success)."""
    columns = (
        TextColumn("[bold]{task.description:<14}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total, remark="")

        def update(done: int, remark: str = "") -> None:
            progress.update(task, completed=done, remark=remark)

        yield update


@contextmanager
def spinner(what: str, remarks_of: str) -> Iterator[None]:
    """A spinner that says ``what``, and behind it the last thing that was logged under ``remarks_of``."""
    log = logging.getLogger(remarks_of)
    before = log.level
    with console.status(what) as status:
        handler = _Shown(lambda remark: status.update(f"{what}: {remark}"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(before)


class _Shown(logging.Handler):
    """Hands messages to ``show``."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


def print_log(log: logging.Logger) -> None:
    """Who comes, leaves and is refused, on standard error."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


def say_the_way(port: int) -> None:
    """How one gets to what is served on this machine's own address."""
    console.print(f"  from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then the same address there")


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of a block to ``seconds[name]``."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


class Clock:
    """Where the time of iterations went, from their metrics (``time/``, see ``docs/tables/metrics.yml``)."""

    def __init__(self) -> None:
        self._total: Counter[str] = Counter()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count one iteration; the validation before the first one is none."""
        if "time/iteration_s" in metrics:
            self._total.update({name: value for name, value in metrics.items() if name.endswith("_s")})

    def shares(self) -> str:
        """The parts of the counted iterations in percent of their wall time, "" without any.

        What collectors did beside this process is said in percent of their own time.
        """
        own, beside = self.parts(), self._parts("collector")
        text = _percent(own)
        return f"{text}; collectors: {_percent(beside)}" if text and any(beside.values()) else text

    def parts(self) -> dict[str, float]:
        """Seconds of this process by what it did, all of the iterations."""
        own = self._parts("time")
        return {**own, "other": max(0.0, self._total["time/iteration_s"] - sum(own.values()))}

    def _parts(self, who: str) -> dict[str, float]:
        return {part: sum(self._total[f"{who}/{name}"] for name in names) for part, names in _PARTS.items()}

    def tell(self) -> None:
        """Print the shares, if anything was counted."""
        if shares := self.shares():
            console.print(f"time: {shares}")


_PARTS = {
    "simulation": ("env_s",),
    "inference": ("encode_s", "act_s"),
    "synchronisation": ("sync_s",),
    "waiting": ("wait_s",),
    "learning": ("learn_s",),
    "validation": ("validate_s",),
}


def _percent(seconds: Mapping[str, float]) -> str:
    """Every part of at least half a percent of all."""
    whole = sum(seconds.values())
    return ", ".join(f"{part} {value / whole:.0%}" for part, value in seconds.items() if value > 0.005 * whole)


def mostly(metrics: Mapping[str, float]) -> str:
    """The part that took most of an iteration, with its share, for instance "61% simulation"; "" without a clock."""
    clock = Clock()
    clock.add(metrics)
    parts = clock.parts()
    name, whole = max(parts, key=parts.__getitem__), sum(parts.values())
    return f"{parts[name] / whole:.0%} {name}" if whole else ""


def steps_per_second(metrics: Mapping[str, float]) -> float:
    """Control steps per second of an iteration, validation left out."""
    seconds = metrics.get("time/iteration_s", 0.0) - metrics.get("time/validate_s", 0.0)
    return metrics.get("env/steps", 0.0) / max(seconds, 1e-9)


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated` meanwhile."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    with _handler(stop):
        yield


@contextmanager
def patient_sigterm() -> Iterator[Callable[[], bool]]:
    """SIGTERM only makes the result return True meanwhile; whoever asks it saves and raises :class:`Terminated`."""
    asked = threading.Event()
    with _handler(lambda number, frame: asked.set()):
        yield asked.is_set


@contextmanager
def ignored_ctrl_c() -> Iterator[None]:
    """Ctrl-C does nothing meanwhile: for what is at its end already and should be whole."""
    with _handler(lambda number, frame: None, signal.SIGINT):
        yield


@contextmanager
def _handler(
    handler: Callable[[int, FrameType | None], None], number: signal.Signals = signal.SIGTERM
) -> Iterator[None]:
    """Python delivers signals to its main thread only; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
