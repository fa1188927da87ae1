"""How chunks of actions are executed while the next one is computed.

Time is counted in control steps: a chunk that was decided on the observation of step ``s`` holds the actions for the
steps ``s``, ``s + 1``, ...  If it arrives before step ``t``, its *delay* is ``t - s`` steps, which is exact: no clock
is read, and nothing is estimated.  Where the arm stood still meanwhile, because an episode has just begun or the chunk
before ran out, the new one begins that many steps later: its actions follow on the observation in which the arm still
is.  So a first chunk begins with its first action, as in LeRobot's asynchronous inference and openpi's client.

Real-time chunking (Black et al. 2025, arXiv 2506.07339) is :class:`RecedingHorizon` with a policy that makes a new
chunk agree with the last one where they overlap: chunks are executed alike, and only the policy differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vla_rl.contract.errors import ContractError


@dataclass(frozen=True)
class Place:
    """Which action is executed: number ``index``, from 0, of the chunk that was decided on at step ``chunk``."""

    chunk: int
    index: int


class Chunks(Protocol):
    """A queue of actions, filled chunk by chunk, from which one action is taken in every control step."""

    def add(self, chunk: np.ndarray, observed: int, now: int) -> None:
        """``chunk`` [H,D], decided on the observation of step ``observed``, is there before step ``now`` is executed.

        A chunk that is over by then, or older than the newest one, changes nothing.  Raises ContractError for a chunk
        that is not two-dimensional and finite, or that was observed in the future.
        """

    def action(self, step: int) -> np.ndarray | None:
        """The action [D] for ``step``; None where no chunk has one."""

    def place(self, step: int) -> Place | None:
        """Where :meth:`action` of ``step`` comes from."""

    def wants(self, step: int) -> bool:
        """Whether the next chunk should be decided on the observation of ``step``."""

    def consumed(self, step: int) -> int | None:
        """How many actions of the newest chunk belong to steps before ``step``; None where there is no chunk."""

    def clear(self) -> None:
        """Forget all chunks."""


class _Newest:
    """The part that most ways of execution share: the newest chunk, from a step on."""

    def __init__(self) -> None:
        self._chunk: np.ndarray | None = None
        self._start, self._observed = 0, 0  # steps: of the chunk's first action, of its observation

    def add(self, chunk: np.ndarray, observed: int, now: int) -> None:
        _check(chunk, observed, now)
        outdated = self._chunk is not None and observed <= self._observed
        start = observed + _stood_still(observed, now, self._end)
        if not outdated and start + len(chunk) > now:  # a copy: a caller may go on to write into its own
            self._chunk, self._observed, self._start = chunk.copy(), observed, start

    def action(self, step: int) -> np.ndarray | None:
        place = self.place(step)
        return None if place is None or self._chunk is None else self._chunk[place.index]

    def place(self, step: int) -> Place | None:
        index = step - self._start
        return Place(self._observed, index) if 0 <= index < self._length else None

    @property
    def _length(self) -> int:
        return 0 if self._chunk is None else len(self._chunk)

    @property
    def _end(self) -> int | None:
        """The first step for which the chunk has no action."""
        return None if self._chunk is None else self._start + self._length

    def consumed(self, step: int) -> int | None:
        return None if self._chunk is None else min(max(step - self._start, 0), len(self._chunk))

    def clear(self) -> None:
        self._chunk = None


class OpenLoop(_Newest):
    """Execute the first ``steps`` actions of a chunk (None: all of them), then stand still and ask for the next.

    The arm waits where it is while the policy computes.
    """

    def __init__(self, steps: int | None = None) -> None:
        super().__init__()
        self._steps = None if steps is None else _positive("steps", steps)

    @property
    def _length(self) -> int:
        length = super()._length
        return length if self._steps is None else min(self._steps, length)

    def wants(self, step: int) -> bool:
        """When nothing is left of the chunk."""
        return self._end is None or step >= self._end


class RecedingHorizon(_Newest):
    """Ask again when ``steps`` actions of the newest chunk belong to the past, and go on with that one meanwhile.

    The new chunk replaces the rest of the old one from the action on whose turn it is: its first ``delay`` actions are
    never executed.  Naively the arm jumps there; see the module for the policy that prevents it.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = _positive("steps", steps)

    def wants(self, step: int) -> bool:
        """When ``steps`` actions have passed, or nothing is left."""
        return self._chunk is None or step >= self._start + min(self._steps, len(self._chunk))


class TemporalEnsembling:
    """Ask in every step and execute the weighted mean of all chunks that have an action for it (ACT, arXiv 2304.13705).

    The weights are exp(-decay * i), where i = 0 is the oldest of those chunks.  Positions of joints are averaged as
    numbers: they lie between limits, so none of them wraps around.
    """

    def __init__(self, decay: float = 0.01) -> None:
        self._decay = decay
        self._chunks: dict[
            int, tuple[int, np.ndarray]
        ] = {}  # first step and actions by the step observed, oldest first

    def add(self, chunk: np.ndarray, observed: int, now: int) -> None:
        _check(chunk, observed, now)
        ends = [start + len(other) for start, other in self._chunks.values()]
        start = observed + _stood_still(observed, now, max(ends, default=None))
        chunks = {**self._chunks, observed: (start, chunk.copy())}
        self._chunks = {key: chunks[key] for key in sorted(chunks) if chunks[key][0] + len(chunks[key][1]) > now}

    def action(self, step: int) -> np.ndarray | None:
        votes = [self._chunks[place.chunk][1][place.index] for place in self._covering(step)]
        if not votes:
            return None
        weights = np.exp(-self._decay * np.arange(len(votes)))
        mean: np.ndarray = np.average(np.stack(votes), 0, weights)
        return mean

    def place(self, step: int) -> Place | None:
        """The newest chunk that has a say."""
        covering = self._covering(step)
        return covering[-1] if covering else None

    def wants(self, step: int) -> bool:
        """Always."""
        return True

    def consumed(self, step: int) -> int | None:
        if not self._chunks:
            return None
        start, chunk = list(self._chunks.values())[-1]
        return min(max(step - start, 0), len(chunk))

    def clear(self) -> None:
        self._chunks = {}

    def _covering(self, step: int) -> list[Place]:
        places = (Place(observed, step - start) for observed, (start, _) in self._chunks.items())
        return [place for place in places if 0 <= place.index < len(self._chunks[place.chunk][1])]


def _stood_still(observed: int, now: int, end: int | None) -> int:
    """How many steps from ``observed`` until ``now`` had no action: those from ``end`` on, all where it is None."""
    return now - observed if end is None else max(now - max(observed, end), 0)


def _check(chunk: np.ndarray, observed: int, now: int) -> None:
    if chunk.ndim != 2 or not len(chunk) or not np.isfinite(chunk).all():
        raise ContractError(
            f"a chunk of shape {list(chunk.shape)} is not [H,D] with finite numbers, so none of its actions is "
            "executed; look at the policy that made it."
        )
    if observed > now:
        raise ContractError(
            f"a chunk was observed at step {observed}, but step {now} is not executed yet, so it is not executed; "
            "let the policy answer with the step of the observation that it was given."
        )


def _positive(name: str, steps: int) -> int:
    if steps < 1:
        raise ContractError(f"{name} is {steps}, so no action would be executed; give 1 or more.")
    return steps
