"""The timeline of a run: what each of its processes did and when, as a trace that Perfetto and chrome://tracing open.

Bounded: the spans of the last :data:`RECENT` iterations.  The format is Google's "Trace Event Format", of which it has
complete events ("X") and names of threads ("M"); times are microseconds since the run began.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.contract.env import Array, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import parse_json, read_bytes
from vla_rl.experience.driver import KINDS, LIMIT, OWN, Span, now, thinned
from vla_rl.training.tracking import RunFolder, write_text

RECENT = 10  # iterations whose spans are kept
TRACE = "trace.json"
_LEARNER = "learner"  # what the lane OWN is called there
_US = 1e6
Lanes = dict[str, list[Span]]


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
        self._iteration = 0
        self.recent: dict[int, Lanes] = {}  # spans by iteration, in seconds since the run began

    @classmethod
    def of(cls, folder: RunFolder) -> Timeline:
        """That of the run in ``folder``; a resumed run continues what ``trace.json`` holds, without the pause.

        Raises UserError where that is damaged.
        """
        made = cls(folder.elapsed)
        if folder.resumed and (saved := folder.path / TRACE).exists():
            made.restore(saved)
        return made

    def begin(self, iteration: int) -> None:
        """What follows belongs to ``iteration``; it and later ones are forgotten, where a resumed run repeats them."""
        self._began, self._iteration = self._began or now(), iteration
        self.recent = {i: lanes for i, lanes in self.recent.items() if iteration - RECENT < i < iteration}
        self.recent[iteration] = {}

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

    def write(self, folder: RunFolder) -> None:
        """Write ``trace.json`` into ``folder``, unless nothing was recorded of which anything is to be kept."""
        if self.recent and (folder.path / "metrics.jsonl").exists():
            write_text(folder.path / TRACE, json.dumps(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """The trace, which :meth:`restore` reads."""
        names = sorted({lane for lanes in self.recent.values() for lane in lanes}, key=lambda lane: (len(lane), lane))
        numbers = {lane: number for number, lane in enumerate(names)}
        threads = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane or _LEARNER}}
            for lane, number in numbers.items()
        ]
        spans = [
            {
                "name": KINDS[kind],
                "ph": "X",
                "ts": round(start * _US),
                "dur": round((stop - start) * _US),
                "pid": 0,
                "tid": numbers[lane],
                "args": {"iteration": iteration},
            }
            for iteration, lanes in self.recent.items()
            for lane, found in lanes.items()
            for kind, start, stop in found
        ]
        return {"displayTimeUnit": "ms", "traceEvents": [*threads, *spans]}

    def restore(self, path: Path) -> None:
        """Continue the timeline that :meth:`write` wrote into ``path``; raises UserError where that is damaged."""
        try:
            events = parse_json(read_bytes(path))["traceEvents"]
            named = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
            recent: dict[int, Lanes] = {}
            for event in (event for event in events if event["ph"] == "X"):
                name, start, seconds = named[event["tid"]], event["ts"] / _US, event["dur"] / _US
                if not math.isfinite(start + seconds):
                    raise ValueError(f"a span from {start} s on")
                lanes = recent.setdefault(int(event["args"]["iteration"]), {})
                span = KINDS.index(event["name"]), start, start + seconds
                lanes.setdefault(OWN if name == _LEARNER else str(name), []).append(span)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"the run's {TRACE} is damaged or of another version ({error}), so it cannot be continued; delete that "
                "file."
            ) from error
        self.recent = recent

    def _overrules(self, span: Span) -> bool:
        """Whether ``span`` lies in a kept one of this process, in whose place it says more exactly what was done.

        For instance: to save the state of a source is to wait for the rollout that it collects.
        """
        kind, start, stop = span[0], span[1] - self._zero, span[2] - self._zero
        for lanes in self.recent.values():
            for i, (other, begin, end) in enumerate(lanes.get(OWN, [])):
                if begin <= start and stop <= end:
                    lanes[OWN][i : i + 1] = [(other, begin, start), (kind, start, stop), (other, stop, end)]
                    return True
        return False

    def _add(self, lane: str, spans: list[Span], beside: bool = False) -> None:
        if not (spans and self._began):
            return
        idle_since = self._delivered.get(lane, self._began)
        if beside and idle_since < spans[0][1]:
            spans = [(KINDS.index("waiting"), idle_since, spans[0][1]), *spans]
        self._delivered[lane] = spans[-1][2]
        kept = self.recent[self._iteration].setdefault(lane, [])
        kept += [(kind, start - self._zero, stop - self._zero) for kind, start, stop in spans]
        if len(kept) > LIMIT:
            self.recent[self._iteration][lane] = thinned(kept)
