"""The timeline of a run: what each of its processes did and when, in seconds since the run began.

Bounded: the spans of the last :data:`RECENT` iterations, and the seconds of every kind of at most twice
:data:`PERIODS` periods, which grow from one iteration each to two, four and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vla_rl.contract.env import Array, on_host
from vla_rl.contract.errors import UserError
from vla_rl.experience.spans import KINDS, LIMIT, OWN, Span, now, thinned

RECENT = 10  # iterations whose spans are kept
PERIODS = 500
Lanes = dict[str, list[Span]]


@dataclass
class Period:
    """Iterations ``first`` to ``last``, from ``start`` to ``stop``; ``seconds`` {lane: {kind: seconds}}."""

    first: int
    last: int
    start: float
    stop: float
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def count(self, lane: str, kind: str, seconds: float) -> None:
        """Add ``seconds`` of ``kind`` in ``lane``."""
        kinds = self.seconds.setdefault(lane, {})
        kinds[kind] = kinds.get(kind, 0.0) + seconds

    def __add__(self, later: Period) -> Period:
        both = Period(self.first, later.last, self.start, later.stop)
        for period in (self, later):
            for lane, kinds in period.seconds.items():
                for kind, seconds in kinds.items():
                    both.count(lane, kind, seconds)
        return both


class Timeline:
    """Collects the spans of a loop (lane ``OWN``) and of the processes that deliver rollouts to it.

    Spans of another process count in the iteration that got their rollout, also if they passed during the one before.
    What passed between two rollouts of a process is its waiting, the way of a rollout to the learner included.
    """

    def __init__(self, elapsed: float = 0.0) -> None:
        """``elapsed``: the seconds that the run took before this process went on with it."""
        self._zero = now() - elapsed
        self._delivered: dict[str, float] = {}  # when the last span of a lane ended, by the wall clock
        self._began = 0.0  # when the first iteration here began, by the wall clock
        self.periods: list[Period] = []
        self.recent: dict[int, Lanes] = {}  # spans by iteration

    def begin(self, iteration: int) -> None:
        """What follows belongs to ``iteration``; it and later ones are forgotten, where a resumed run repeats them."""
        time = now() - self._zero
        if self._began:
            self.periods[-1].stop = time
        self._began = self._began or now()
        self.periods = [period for period in self.periods if period.last < iteration]
        self.recent = {i: lanes for i, lanes in self.recent.items() if iteration - RECENT < i < iteration}
        self.recent[iteration] = {}
        if len(self.periods) >= 2 * PERIODS:
            pairs = zip(self.periods[::2], self.periods[1::2], strict=True)
            self.periods = [first + second for first, second in pairs]
        self.periods.append(Period(iteration, iteration, time, time))

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """What is done meanwhile is ``kind``; if it fails, or before the first :meth:`begin`, nothing is recorded."""
        start = now()
        yield
        self._add(OWN, [(KINDS.index(kind), start, now())])

    def collected(self, spans: Mapping[str, Array], start: float) -> None:
        """A rollout with ``spans`` was asked for at ``start`` (:func:`now`) and is there.

        Without spans of this process it has waited meanwhile.
        """
        if OWN not in spans:
            self._add(OWN, [(KINDS.index("waiting"), start, now())])
        for lane, found in spans.items():
            table = np.asarray(on_host(found), np.float64).reshape(-1, 3).tolist()
            rows = [(int(kind), begin, end) for kind, begin, end in table]
            if lane == OWN:
                rows = [row for row in rows if not (row[1] < start and self._overrules(row))]
            self._add(lane, rows, beside=lane != OWN)

    def _overrules(self, span: Span) -> bool:
        """Whether ``span`` lies in a kept one of this process, in whose place it says more exactly what was done.

        For instance: to save the state of a source is to wait for the rollout that it collects.
        """
        kind, start, stop = span[0], span[1] - self._zero, span[2] - self._zero
        for number, lanes in self.recent.items():
            for i, (other, begin, end) in enumerate(lanes.get(OWN, [])):
                if begin <= start and stop <= end:
                    lanes[OWN][i : i + 1] = [(other, begin, start), (kind, start, stop), (other, stop, end)]
                    period = next(period for period in self.periods if period.first <= number <= period.last)
                    period.count(OWN, KINDS[other], start - stop)
                    period.count(OWN, KINDS[kind], stop - start)
                    return True
        return False

    def _add(self, lane: str, spans: list[Span], beside: bool = False) -> None:
        if not (spans and self._began):
            return
        idle_since = self._delivered.get(lane, self._began)
        if beside and idle_since < spans[0][1]:
            spans = [(KINDS.index("waiting"), idle_since, spans[0][1]), *spans]
        self._delivered[lane] = spans[-1][2]
        period = self.periods[-1]
        for kind, start, stop in spans:
            period.count(lane, KINDS[kind], stop - start)
        moved = [(kind, start - self._zero, stop - self._zero) for kind, start, stop in spans]
        period.stop = max(period.stop, moved[-1][2])
        kept = self.recent[period.last].setdefault(lane, [])
        kept += moved
        if len(kept) > LIMIT:
            self.recent[period.last][lane] = thinned(kept)

    def to_json(self) -> dict[str, Any]:
        """What :meth:`restore` reads."""
        spans = {
            str(number): {
                lane: [[kind, round(start, 5), round(stop, 5)] for kind, start, stop in found]
                for lane, found in lanes.items()
            }
            for number, lanes in self.recent.items()
        }
        return {"kinds": list(KINDS), "periods": [asdict(period) for period in self.periods], "spans": spans}

    def restore(self, text: str) -> None:
        """Continue the timeline of :meth:`to_json`, as JSON; raises UserError where that is damaged."""
        try:
            saved = json.loads(text)
            if saved["kinds"] != list(KINDS):
                raise ValueError(f"kinds {saved['kinds']}")
            self.periods = [Period(**period) for period in saved["periods"]]
            self.recent = {
                int(number): {
                    lane: [(int(k), float(a), float(b)) for k, a, b in found] for lane, found in lanes.items()
                }
                for number, lanes in saved["spans"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"the run's timeline.json is damaged or of another version ({error}), so it cannot be continued; "
                "delete that file."
            ) from error
