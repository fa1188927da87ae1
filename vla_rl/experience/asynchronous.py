"""Asynchronous experience: every source plays on while the learner learns, and nobody waits for the slowest one.

    begun windows < windows of a rollout * (rollouts asked for + staleness)        (as AReaL, arXiv 2505.24298, eq. 3)

A source that has finished a window begins the next one at once, within that bound, and takes the newest weights at
every decision: a window goes on over a change of weights, and ``Rollout.version`` says who decided what.  A rollout is
made of the first windows that are finished, whoever played them, the oldest of these first.  Nobody waits for a window
that a slow step holds up: its first decisions may be more than ``staleness`` updates old when it is finished, and the
learner weights them by their age and drops those beyond its ``max_age``.

The state of every source is kept as it was after its last finished window.  So a run is saved without waiting for
anybody, and a source whose process has died is made anew and plays the unfinished window again, from the same seeds:
where environments have snapshots nothing is lost, doubled or reordered.  Which windows meet in a rollout depends on
their speed, so equal seeds do not give equal results; with a staleness of 0 use ``background.py``, where they do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Thread
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.experience.background import CollectingSource, acting_copy, saved_rollout, summed_info
from vla_rl.experience.columns import side_by_side
from vla_rl.experience.driver import no_seconds
from vla_rl.experience.spans import Spans, joined
from vla_rl.experience.worker import LostWorkerError

ATTEMPTS = 5  # at a window whose source's process dies


@runtime_checkable
class Advancing(Protocol):
    """A source that may be given other weights between two decisions."""

    def advance(self) -> bool:
        """Make one decision, unless the window is complete; returns whether it is now."""

    def deliver(self) -> Rollout:
        """The complete window as a rollout; the next one begins."""


class AdvancingSource(CollectingSource, Advancing, Protocol):
    """What :class:`AsyncSource` plays."""


class _Player:
    """A source in its thread, and its state after its last finished window."""

    def __init__(self, source: AdvancingSource, remake: Callable[[], AdvancingSource] | None) -> None:
        self.source, self._remake = source, remake
        self.state: dict[str, Any] | None = None
        self.restarts = 0
        self._lost, self._placed = False, False
        self._acting: Policy | None = None

    def play(self, newest: Callable[[], Policy | None]) -> tuple[Rollout, dict[str, Any]] | None:
        """The next window and the state after it, decided by the ``newest`` weights; None when there are none.

        A source whose process dies is made anew and begins the window again.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._live()
                return self._window(newest)
            except LostWorkerError:
                if self._remake is None or attempt == ATTEMPTS:
                    raise
                self._lost, self._placed = True, False
        return None

    def _live(self) -> None:
        """Make the source anew if its process has died."""
        if self._lost and self._remake is not None:
            self.source = self._remake()
            self._lost, self._acting = False, None
            self.restarts += 1

    def _window(self, newest: Callable[[], Policy | None]) -> tuple[Rollout, dict[str, Any]] | None:
        self._place()
        complete = False
        while not complete:
            policy = newest()
            if policy is None:
                return None
            if policy is not self._acting:
                self.source.policy = policy
                self._acting = policy
            complete = self.source.advance()
        rollout = self.source.deliver()
        return rollout, self.source.state_dict()

    def _place(self) -> None:
        """Bring a new source to where the last finished window ended."""
        if self._placed:
            return
        if self.state is None:
            self.state = self.source.state_dict()
        else:
            self.source.load_state_dict(self.state)
        self._placed = True

    def close(self) -> None:
        with contextlib.suppress(LostWorkerError):  # then there is nothing left to close
            self.source.close()


@dataclass(eq=False)
class _Window:
    """The ``number``-th window that was begun, by the source ``player``."""

    number: int
    player: int
    rollout: Rollout | None = None
    error: Exception | None = None


class AsyncSource:
    """An ``ExperienceSource`` whose ``sources`` begin windows for at most ``staleness`` updates after the next one.

    ``policy`` is what the learner changes; sources act with copies of it, taken at every :meth:`next`.  Everything that
    concerns a source happens in its thread.  An exception of a source is raised by :meth:`next`; a further call lets it
    try again with the weights of that time.
    """

    def __init__(
        self,
        sources: Sequence[AdvancingSource],
        policy: Policy,
        staleness: int,
        windows: int | None = None,
        remake: Callable[[int], AdvancingSource] | None = None,
    ) -> None:
        """``windows`` make a rollout (None: as many as there are sources).

        ``remake(i)`` makes source ``i`` again, in a process that lives; without it a dead process ends the run.
        Raises UserError for a staleness that cannot keep every source busy.
        """
        self.policy, self.staleness = policy, staleness
        self.windows = len(sources) if windows is None else windows
        _require_busy(len(sources), staleness, self.windows)
        self._players = [
            _Player(source, None if remake is None else partial(remake, i)) for i, source in enumerate(sources)
        ]
        self._changed = Condition()
        self._open: list[_Window] = []  # begun and not delivered, in this order
        self._begun = self._asked = self._delivered = 0
        self._newest: Policy | None = None
        self._waits = Spans()  # the learner's
        self._threads: list[Thread] = []
        self._closed = False

    def next(self) -> Rollout:
        """The first windows that are finished, side by side; seconds as for ``BackgroundSource.next``.

        Where a rollout is one window, its ``stream`` names its source.  ``info`` also has ``source/waiting``, the
        finished windows that wait for later rollouts, and ``source/restarts``, how often sources were made anew so far
        because their processes had died.
        """
        start = time.perf_counter()
        newest = acting_copy(self.policy)
        with self._changed:
            self._newest, self._asked = newest, self._delivered + 1
            for window in self._open:
                window.error = None
            self._start_threads()
            self._changed.notify_all()
            self._changed.wait_for(self._answerable)
            chosen = self._choose()
            self._delivered += 1
            waiting = len(self._finished())
        stop = time.perf_counter()
        self._waits.add("waiting", start, stop)
        rollouts = [window.rollout for window in chosen if window.rollout is not None]
        seconds = no_seconds() | {"time/wait_s": stop - start}
        restarts = sum(player.restarts for player in self._players)
        counters = {"source/waiting": float(waiting), "source/restarts": float(restarts)}
        whole = side_by_side(rollouts, summed_info(rollouts) | seconds | counters)
        stream = f"source-{chosen[0].player}" if self.windows == 1 else ""
        return replace(whole, stream=stream, spans=self._waits.take() | _lanes(chosen))

    def state_dict(self) -> dict[str, Any]:
        """Finished windows and the sources' states after them (see ``Resumable``); running ones are played again."""
        with self._changed:
            windows = [
                {"player": window.player, "rollout": saved_rollout(window.rollout)}
                for window in self._open
                if window.rollout is not None
            ]
            return {"windows": windows, "sources": [player.state for player in self._players]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; raises UserError when that was of more or fewer sources."""
        if len(state["sources"]) != len(self._players):
            raise UserError(
                f"the saved state is that of {len(state['sources'])} sources and there are {len(self._players)} now, "
                "so the run cannot continue; give as many as it was started with."
            )
        for player, saved in zip(self._players, state["sources"], strict=True):
            player.state = saved
        self._open = [
            _Window(number, item["player"], Rollout(**item["rollout"])) for number, item in enumerate(state["windows"])
        ]
        self._begun = len(self._open)

    def close(self) -> None:
        """End the threads, which close their sources after the decision that they make; safe to call twice."""
        with self._changed:
            started, self._closed = bool(self._threads) or self._closed, True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if not started:
            for player in self._players:
                player.close()

    # -- the learner's side, which holds the lock ----------------------------------------------------------------------

    def _start_threads(self) -> None:
        if not self._threads and not self._closed:
            self._threads = [
                Thread(target=self._run, args=(i,), name=f"source-{i}", daemon=True) for i in range(len(self._players))
            ]
            for thread in self._threads:
                thread.start()

    def _answerable(self) -> bool:
        """Whether a rollout is complete; raises what ended a source, and UserError when this one was closed."""
        if self._closed:
            raise UserError("the source was closed, so it has no further rollout; make a new one.")
        for window in self._open:
            if window.error is not None:
                raise window.error
        return len(self._finished()) >= self.windows

    def _finished(self) -> list[_Window]:
        """In the order in which they were begun."""
        return [window for window in self._open if window.rollout is not None]

    def _choose(self) -> list[_Window]:
        """The windows of the next rollout, by source and in the order in which each played them."""
        chosen = self._finished()[: self.windows]
        self._open = [window for window in self._open if window not in chosen]
        return sorted(chosen, key=lambda window: (window.player, window.number))

    # -- a source's thread ---------------------------------------------------------------------------------------------

    def _run(self, i: int) -> None:
        try:
            while (window := self._begin(i)) is not None:
                while window.rollout is None and self._may_try(window):
                    self._try(self._players[i], window)
        finally:
            self._players[i].close()

    def _begin(self, i: int) -> _Window | None:
        """The next window of source ``i``, once the bound allows one; None when everything ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._begun < self.windows * (self._asked + self.staleness))
            if self._closed:
                return None
            window = _Window(self._begun, i)
            self._begun += 1
            self._open.append(window)
            return window

    def _may_try(self, window: _Window) -> bool:
        """Wait until the error of ``window``, if it has one, is forgotten; False when everything ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or window.error is None)
            return not self._closed

    def _try(self, player: _Player, window: _Window) -> None:
        """Play ``window``: it gets its rollout, or the exception that came."""
        try:
            played = player.play(lambda: None if self._closed else self._newest)
        except Exception as error:  # whatever it is, the learner's thread raises it
            with self._changed:
                window.error = error
                self._changed.notify_all()
            return
        if played is not None:
            with self._changed:  # a state is never saved without the window that led to it
                window.rollout, player.state = played
                self._changed.notify_all()


def _lanes(windows: Sequence[_Window]) -> dict[str, np.ndarray]:
    """The spans of ``windows``, those of a source in lanes of its own."""
    found: dict[str, np.ndarray] = {}
    for player in dict.fromkeys(window.player for window in windows):
        spans = joined([window.rollout.spans for window in windows if window.player == player and window.rollout])
        found |= {f"source {player + 1} {lane}".strip(): item for lane, item in spans.items()}
    return found


def _require_busy(sources: int, staleness: int, windows: int) -> None:
    """Raise UserError when some sources would never play, or none is ahead."""
    if sources < 1 or staleness < 1:
        raise UserError(
            f"{sources} sources with a staleness of {staleness} are never ahead of the learner, so nothing would be "
            "asynchronous; give at least one source and a staleness of 1, or set staleness to 0."
        )
    if sources > windows * (1 + staleness):
        busy = windows * (1 + staleness)
        raise UserError(
            f"a staleness of {staleness} lets {busy} windows be under way, so {sources - busy} of {sources} sources "
            f"would never play; set staleness to {-(-sources // windows) - 1} or more, or start {busy} sources."
        )
