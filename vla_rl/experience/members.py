"""Groups while they are played: their members, what each has earned, and whether the returns differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from vla_rl.contract.batch import TRUNCATION_RETURN, Rollout
from vla_rl.contract.policy import Features
from vla_rl.experience.columns import episode_column, side_by_side
from vla_rl.experience.driver import Decision


@dataclass
class Member:
    """One member of a group: the environment that plays it and what it has earned so far."""

    env_id: int
    start: int  # its first decision, as an index into the decisions of the rollout
    stop: int | None = None  # one after its last decision
    reward: float = 0.0  # sum of its rewards
    success: bool = False
    final: Features | None = None  # features of its last observation if it was truncated
    truncation_return: float = 0.0  # what it would still have earned then
    attempts: int = 1  # how often it was begun

    @property
    def episode_return(self) -> float:
        """The return by which members are compared."""
        return self.reward + self.truncation_return

    def begin_again(self, start: int) -> None:
        """Forget what was played: its simulator broke down, and it is played anew from decision ``start`` on."""
        self.start, self.reward, self.attempts = start, 0.0, self.attempts + 1

    def to_rollout(self, decisions: Sequence[Decision], seed: int, robot: str) -> Rollout:
        """The episode as one column, with its truncation return if it was truncated."""
        part = episode_column(decisions[self.start : self.stop], self.env_id, seed, self.final, robot)
        count, device = len(part.final_index), part.final_index.device
        remaining = torch.full((count,), self.truncation_return, dtype=torch.float64, device=device)
        return replace(part, final_features={**part.final_features, TRUNCATION_RETURN: remaining})


@dataclass
class Group:
    """``size`` members that start from ``seed``; ``members`` are those that were launched."""

    seed: int
    size: int
    members: list[Member] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.members) == self.size

    @property
    def ended(self) -> bool:
        return self.full and all(member.stop is not None for member in self.members)

    @property
    def mixed(self) -> bool:
        """Whether it has ended and the returns of its members differ."""
        return self.ended and any(member.episode_return != self.members[0].episode_return for member in self.members)

    def to_rollout(self, decisions: Sequence[Decision], robot: str) -> Rollout:
        """Its episodes as columns, in the order in which they were launched."""
        return side_by_side([member.to_rollout(decisions, self.seed, robot) for member in self.members])
