"""Fair timing of two or more implementations of the same work, and the rows of the results."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

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
