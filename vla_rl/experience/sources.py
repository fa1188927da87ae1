"""Experience of several sources side by side, in step with the learner or ahead of it.

    begun windows < windows of a rollout * (rollouts asked for + staleness)        (as AReaL, arXiv 2505.24298, eq. 3)

**In step**, with a staleness of 0, every source plays one window for each rollout while the learner waits, so equal
seeds give equal results.

**Ahead**, a source that has finished a window begins the next one at once, within that bound, and takes the newest
weights at every decision: a window goes on over a change of weights, and ``Rollout.version`` says who decided what.  A
rollout is made of the first windows that are finished, whoever played them, the oldest of these first.  Nobody waits
for a window that a slow step holds up: its first decisions may be more than ``staleness`` updates old when it is
finished, and the learner weights them by their age and drops those beyond its ``max_age``.  The state of every source
is kept as it was after its last finished window.  So a run is saved without waiting for anybody, and a source whose
process has died is made anew and plays the unfinished window again, from the same seeds: where environments have
snapshots nothing is lost, doubled or reordered.  Which windows meet in a rollout depends on their speed.

A thread waits for each source.  Threads that compute hinder each other by Python's lock, so sources that are to use
several cores live in processes of their own (``process.py``).
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition
from typing import Any, Protocol, cast

import numpy as np
from torch import nn

from vla_rl.contract.batch import ExperienceSource, Resumable, Rollout
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Policy
from vla_rl.experience.driver import Spans, joined, no_seconds
from vla_rl.experience.process import WholeWeights, is_cut
from vla_rl.experience.rollout import side_by_side, to_state
from vla_rl.experience.worker import LostWorkerError

ATTEMPTS = 5  # at a window whose source's process dies


class CollectingSource(ExperienceSource, Resumable, Protocol):
    """A source that acts in its environment with ``policy``, which may be replaced between two rollouts.

    One that plays ahead also has ``advance() -> bool``, which makes one decision, unless the window is complete, and
    says whether it is now; and ``deliver() -> Rollout``, the complete window, after which the next one begins.
    """

    policy: Policy

    def close(self) -> None:
        """Close the environment."""


class _Player:
    """A source in its thread, because an OpenGL context belongs to one, and its state after its last kept window."""

    def __init__(self, number: int, source: CollectingSource, remake: Callable[[int], CollectingSource] | None) -> None:
        self.source, self._remake = source, None if remake is None else partial(remake, number)
        self.thread = ThreadPoolExecutor(1, f"collector-{number}")
        self.state: dict[str, Any] | None = None
        self.placed = False  # where ``state`` says
        self.restarts = 0
        self._lost = False
        self._acting: Policy | None = None

    def in_step(self, policy: Policy) -> Rollout:
        """The next window, decided by ``policy`` alone."""
        self._place()
        self.source.policy = policy
        return self.source.next()

    def ahead(self, newest: Callable[[], Policy | None]) -> tuple[Rollout, dict[str, Any]] | None:
        """The next window and the state after it, decided by the ``newest`` policy; None when there is none.

        A source whose process dies is made anew and begins the window again.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._live()
                return self._window(newest)
            except LostWorkerError:
                if self._remake is None or attempt == ATTEMPTS:
                    raise
                self._lost, self.placed = True, False
        return None

    def saved(self) -> dict[str, Any]:
        """The state of a source that plays in step and is idle."""
        if self.state is not None and not self.placed:
            return self.state
        return self.thread.submit(self.source.state_dict).result()

    def _live(self) -> None:
        """Make the source anew if its process has died."""
        if self._lost and self._remake is not None:
            self.source = self._remake()
            self._lost, self._acting = False, None
            self.restarts += 1

    def _window(self, newest: Callable[[], Policy | None]) -> tuple[Rollout, dict[str, Any]] | None:
        if self.state is None:
            self.state, self.placed = self.source.state_dict(), True
        self._place()
        source: Any = self.source  # which can advance
        complete = False
        while not complete:
            policy = newest()
            if policy is None:
                return None
            if policy is not self._acting:
                source.policy = self._acting = policy
            complete = source.advance()
        return source.deliver(), source.state_dict()

    def _place(self) -> None:
        """Bring a new source to where the last kept window ended."""
        if self.state is not None and not self.placed:
            self.source.load_state_dict(self.state)
        self.placed = True

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


class Collectors:
    """An ``ExperienceSource`` of what ``sources`` collect side by side, at most ``staleness`` updates ahead.

    ``policy`` is what the learner changes; ahead of it, sources act with copies, taken at every :meth:`next`.  Where it
    is cut into shards, sources get its whole weights, so they must be processes.  Everything that concerns a source
    happens in its thread.  An exception of a source is raised by :meth:`next`; what the others have collected is kept,
    and a further call repeats what failed, with the weights of that time.
    """

    def __init__(
        self,
        sources: Sequence[CollectingSource],
        policy: Policy,
        staleness: int = 0,
        windows: int | None = None,
        remake: Callable[[int], CollectingSource] | None = None,
    ) -> None:
        """``windows`` make a rollout that is ahead (None: as many as there are sources); in step it has all of them.

        ``remake(i)`` makes source ``i`` again, in a process that lives, for a source ahead; without it, and in step, a
        dead process ends the run.  Raises UserError without sources, for a staleness that cannot keep every source
        busy, and for a source that cannot play ahead.
        """
        self.policy, self.staleness = policy, staleness
        self.windows = windows if windows and staleness else len(sources)
        _require_busy(sources, staleness, self.windows)
        self._players = [_Player(i, source, remake) for i, source in enumerate(sources)]
        self._changed = Condition()
        self._open: list[_Window] = []  # begun and not delivered, in this order
        self._busy: set[int] = set()  # sources that play
        self._begun = self._asked = self._delivered = 0
        self._newest: Policy | None = None
        self._waits = Spans()  # the learner's
        self._closed = False

    def next(self) -> Rollout:
        """The first windows that are finished, side by side; counters in ``info`` are their sums.

        Seconds of the sources are means and called ``collector/``: they passed beside the caller, whose own
        ``time/wait_s`` says how long it waited.  Where a rollout is one window, its ``stream`` names its source.
        Ahead, ``info`` also has ``source/waiting``, the finished windows that wait for later rollouts, and
        ``source/restarts``, how often sources were made anew so far because their processes had died.
        """
        start = time.perf_counter()
        newest = self._acting_policy()
        with self._changed:
            self._newest, self._asked = newest, self._delivered + 1
            for window in self._open:
                window.error = None
            self._begin()
            self._changed.wait_for(self._answerable)
            chosen = self._choose()
            self._delivered += 1
            waiting = len(self._finished())
        stop = time.perf_counter()
        self._waits.add("waiting", start, stop)
        rollouts = [window.rollout for window in chosen if window.rollout is not None]
        info = summed_info(rollouts) | no_seconds() | {"time/wait_s": stop - start}
        if self.staleness:
            restarts = sum(player.restarts for player in self._players)
            info |= {"source/waiting": float(waiting), "source/restarts": float(restarts)}
        stream = f"source-{chosen[0].player}" if self.windows == 1 else ""
        return replace(side_by_side(rollouts, info), stream=stream, spans=self._waits.take() | _lanes(chosen))

    def state_dict(self) -> dict[str, Any]:
        """Finished windows and the sources' states after them (see ``Resumable``); running ones are played again."""
        with self._changed:
            windows = [
                {"player": window.player, "rollout": saved_rollout(window.rollout)}
                for window in self._open
                if window.rollout is not None
            ]
            if self.staleness:
                return {"windows": windows, "sources": [player.state for player in self._players]}
        return {"windows": windows, "sources": [player.saved() for player in self._players]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; raises UserError when that was of more or fewer sources."""
        if len(state["sources"]) != len(self._players):
            raise UserError(
                f"the saved state is that of {len(state['sources'])} sources and there are {len(self._players)} now, "
                "so the run cannot continue; give as many as it was started with."
            )
        for player, saved in zip(self._players, state["sources"], strict=True):
            player.state, player.placed = saved, False
        self._open = [
            _Window(number, item["player"], Rollout(**item["rollout"])) for number, item in enumerate(state["windows"])
        ]
        self._begun = len(self._open)

    def close(self) -> None:
        """Close the sources: in step after the window, ahead after the decision that they make; safe to call twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for player in self._players:
            player.thread.submit(player.close)
        for player in self._players:
            player.thread.shutdown()

    def _acting_policy(self) -> Policy:
        if is_cut(self.policy):
            return cast(Policy, WholeWeights.of(self.policy))
        return acting_copy(self.policy) if self.staleness else self.policy

    # -- with the lock -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Let every idle source play its next window, if there is one for it."""
        for i, player in enumerate(() if self._closed else self._players):
            if i not in self._busy and (window := self._next_window(i)) is not None:
                self._busy.add(i)
                player.thread.submit(self._play, player, window)

    def _next_window(self, i: int) -> _Window | None:
        """What source ``i`` plays next: what failed before, or what the bound allows."""
        own = [window for window in self._open if window.player == i]
        if unfinished := [window for window in own if window.rollout is None]:
            return unfinished[0] if unfinished[0].error is None else None
        bound = self._begun < self.windows * (self._asked + self.staleness) if self.staleness else not own
        if not bound:
            return None
        self._open.append(_Window(self._begun, i))
        self._begun += 1
        return self._open[-1]

    def _answerable(self) -> bool:
        """Whether a rollout is complete; raises what a source raised, and UserError when this one was closed.

        In step, nobody plays then.
        """
        if self._closed:
            raise UserError("the source was closed, so it has no further rollout; make a new one.")
        if self._busy and not self.staleness:
            return False
        for window in sorted(self._open, key=lambda window: window.player):
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

    # -- in a source's thread ------------------------------------------------------------------------------------------

    def _play(self, player: _Player, window: _Window) -> None:
        """Play ``window``: it gets its rollout, or the exception that came; then the source goes on, if it may."""
        played, state, error = None, None, None
        try:
            if self.staleness:
                played, state = player.ahead(lambda: None if self._closed else self._newest) or (None, None)
            elif self._newest is not None:
                played = player.in_step(self._newest)
        except Exception as raised:  # whatever it is, the learner's thread raises it
            error = raised
        with self._changed:  # a state is never saved without the window that led to it
            window.rollout, window.error = played, error
            player.state = state if state is not None else player.state
            self._busy.discard(window.player)
            if self.staleness:
                self._begin()
            self._changed.notify_all()


def acting_copy(policy: Policy) -> Policy:
    """A copy that later steps of a learner leave alone; parameters that never change are shared with ``policy``."""
    shared: dict[int, Any] = {}
    trainable = getattr(policy, "trainable", None)
    if isinstance(policy, nn.Module) and callable(trainable):
        moving = {id(parameter) for parameter in trainable().values()}
        shared = {id(item): item for item in policy.parameters() if id(item) not in moving}
    return copy.deepcopy(policy, shared)


def saved_rollout(rollout: Rollout) -> dict[str, Any]:
    """``rollout`` without the seconds that it took, so that equal runs have equal states."""
    info = {name: value for name, value in rollout.info.items() if not name.endswith("_s")}
    return {**to_state(rollout), "info": info, "spans": {}}


def summed_info(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The sums of the counters of ``rollouts``; their seconds are means, called ``collector/``."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.info)
    sums = {name: sum(rollout.info.get(name, 0.0) for rollout in rollouts) for name in names}
    return {
        name.replace("time/", "collector/"): value / len(rollouts) if name.endswith("_s") else value
        for name, value in sums.items()
    }


def _lanes(windows: Sequence[_Window]) -> dict[str, np.ndarray]:
    """The spans of ``windows``, those of a source in lanes of its own."""
    found: dict[str, np.ndarray] = {}
    for player in dict.fromkeys(window.player for window in windows):
        spans = joined([window.rollout.spans for window in windows if window.player == player and window.rollout])
        found |= {f"collector {player + 1} {lane}".strip(): item for lane, item in spans.items()}
    return found


def _require_busy(sources: Sequence[CollectingSource], staleness: int, windows: int) -> None:
    """Raise UserError without sources, when some would never play, and for those that cannot play ahead."""
    if not sources:
        raise UserError("there is no source, so nothing is collected; give one at least.")
    busy = windows * (1 + staleness)
    if len(sources) > busy:
        raise UserError(
            f"a staleness of {staleness} lets {busy} windows be under way, so {len(sources) - busy} of {len(sources)} "
            f"sources would never play; set staleness to {-(-len(sources) // windows) - 1} or more, or start {busy} "
            "sources."
        )
    for source in sources if staleness else ():
        if not (hasattr(source, "advance") and hasattr(source, "deliver")):
            raise UserError(
                f"{type(source).__name__} has no advance and deliver, so it cannot play on while the policy changes; "
                "add them, or set staleness to 0."
            )
