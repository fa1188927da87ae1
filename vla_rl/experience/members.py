"""Groups while they are played: who is in them, what each member has earned, and whether the group is mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from vla_rl.contract.batch import TRUNCATION_RETURN, Rollout
from vla_rl.contract.policy import Features
from vla_rl.experience.columns import Moment, beside, column


@dataclass
class Member:
    """One member of a group: where it is played and, so far, what it earned."""

    row: int
    start: int  # its first decision, as an index into the moments
    stop: int | None = None  # one after its last decision
    value: float = 0.0  # sum of its rewards
    success: bool = False
    last: Features | None = None  # what was kept of its last observation, if it was truncated
    beyond: float = 0.0  # what it would still have earned then

    @property
    def worth(self) -> float:
        """Its return, by which it is compared."""
        return self.value + self.beyond

    def cut(self, moments: Sequence[Moment], seed: int) -> Rollout:
        """It as one column, with what lies beyond its end if it was truncated."""
        part = column(moments[self.start : self.stop], self.row, seed, self.last)
        beyond = torch.full((len(part.final_index),), self.beyond, dtype=torch.float64)
        return replace(part, final_features={**part.final_features, TRUNCATION_RETURN: beyond})


@dataclass
class Group:
    """``size`` members that begin with ``seed``, as far as they have been launched."""

    seed: int
    size: int
    episodes: list[Member] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.episodes) == self.size

    @property
    def ended(self) -> bool:
        return self.full and all(episode.stop is not None for episode in self.episodes)

    @property
    def mixed(self) -> bool:
        return self.ended and any(episode.worth != self.episodes[0].worth for episode in self.episodes)

    def cut(self, moments: Sequence[Moment]) -> Rollout:
        """Its episodes as columns, in the order in which they were launched."""
        return beside([episode.cut(moments, self.seed) for episode in self.episodes])
