"""Spans of time: what a process did from when to when, in seconds that several processes of a machine share.

A driver records spans, a source hands them over with its rollout (``Rollout.spans``), and the training loop collects
them with its own (``vla_rl/training/timeline.py``).

    spans = Spans()
    spans.add("simulating", start, stop)    # seconds of time.perf_counter()
    rollout = replace(rollout, spans=spans.take())

Spans of one process follow each other; none lies within another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import Array, on_host

KINDS = ("waiting", "simulating", "inferring", "syncing", "learning", "validating", "saving")
OWN = ""  # the lane of the process that asked for the rollout; others are named
LIMIT = 512  # spans of one lane and rollout
_PARTS = 64  # of time, in which the spans of one kind become one where there are too many
_TOUCHING = 1e-4  # seconds between two spans of one kind that are one: encoding and acting, for instance
# perf_counter has no common zero; the wall clock has one, and may be set back while a process runs.
_ZERO = time.time() - time.perf_counter()

Span = tuple[int, float, float]  # index into KINDS, start, stop


def now() -> float:
    """Seconds of the wall clock at this process's start plus those that have passed since."""
    return _ZERO + time.perf_counter()


class Spans:
    """The spans of one process since they were taken last, at most :data:`LIMIT`.

    Where there are more, time is cut into equal parts, and in each part the spans of one kind become one.  So the
    seconds of each kind stay what they are, and their order within a part is lost.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, kind: str, start: float, stop: float) -> None:
        """``kind`` from ``start`` to ``stop``, seconds of ``time.perf_counter()`` after those of earlier spans."""
        index, start, stop = KINDS.index(kind), _ZERO + start, _ZERO + stop
        if self._spans and self._spans[-1][0] == index and start - self._spans[-1][2] < _TOUCHING:
            start = self._spans.pop()[1]
        self._spans.append((index, start, stop))
        if len(self._spans) > LIMIT:
            self._spans = thinned(self._spans)

    def take(self) -> dict[str, np.ndarray]:
        """All spans as those of the lane :data:`OWN`, float64 [S,3] of kind, start and stop; the next ones begin."""
        spans, self._spans = self._spans, []
        return {OWN: as_array(spans)}


def as_array(spans: Sequence[Span]) -> np.ndarray:
    """float64 [S,3]."""
    return np.array(spans, np.float64).reshape(-1, 3)


def thinned(spans: Sequence[Span]) -> list[Span]:
    """``spans``, in order of time, with one span of each kind in each of :data:`_PARTS` equal parts of their time."""
    begin, end = spans[0][1], spans[-1][2]
    size = (end - begin) / _PARTS or 1.0
    found: list[Span] = []
    for _, group in groupby(spans, key=lambda span: min(int((span[1] - begin) / size), _PARTS - 1)):
        part = list(group)
        at = part[0][1]
        for kind in dict.fromkeys(span[0] for span in part):
            seconds = sum(span[2] - span[1] for span in part if span[0] == kind)
            found.append((kind, at, at + seconds))
            at += seconds
    return found


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, np.ndarray]:
    """The spans of several drivers in one process that took turns, in order of time."""
    lanes = dict.fromkeys(lane for part in parts for lane in part)
    found = {lane: np.concatenate([on_host(part[lane]) for part in parts if lane in part]) for lane in lanes}
    return {lane: spans[np.argsort(spans[:, 1], kind="stable")] for lane, spans in found.items()}


def beside(rollouts: Sequence[Rollout], own: Mapping[str, Array], names: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Spans of sources that collected beside the caller, each in a lane called ``names[i]``, and the caller's ``own``.

    Without names they are "collector 1", "collector 2" and so on.
    """
    names = names or [f"collector {number}" for number in range(1, len(rollouts) + 1)]
    found = {lane: on_host(spans) for lane, spans in own.items()}
    for name, rollout in zip(names, rollouts, strict=True):
        for lane, spans in rollout.spans.items():
            found[f"{name} {lane}".strip()] = on_host(spans)
    return found
