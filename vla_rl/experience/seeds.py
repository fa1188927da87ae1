"""The seeds of a source's episodes, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vla_rl.experience.driver import Decision


class SeedStream(Iterator[int]):
    """Every ``step``-th seed from ``start`` to before ``stop``, in order, and then from the start again.

    A source says how its episodes end; a stream that chooses by that is a ``CurriculumStream``.
    """

    def __init__(self, start: int, stop: int, step: int = 1) -> None:
        self.seeds = range(start, stop, step)
        self.drawn = 0

    def __next__(self) -> int:
        seed = self.seeds[self.drawn % len(self.seeds)]
        self.drawn += 1
        return seed

    def draw(self, taken: Collection[int]) -> int:
        """The next seed; a stream that has a choice leaves out those that are ``taken``."""
        return next(self)

    def ended(self, decision: Decision, env_ids: Sequence[int] | np.ndarray) -> None:
        """The episodes of the environments ``env_ids`` [R] ended with ``decision``."""

    def counters(self) -> dict[str, float]:
        """What the stream has counted since the last call, for a rollout's ``info``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """How far the stream is."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any] | int) -> None:
        """Continue from what :meth:`state_dict` returned; a number is that of seeds drawn, as it was saved before."""
        self.drawn = state if isinstance(state, int) else state["drawn"]
