"""What an imagined rollout is paid with the last action of a call that is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from vla_rl.contract.errors import UserError
from world_models.config import RewardHeadConfig
from world_models.types import Future


@dataclass(frozen=True)
class SuccessReward:
    """1 for a call that succeeds: the sparse reward of a task that has one."""

    def require(self, head: RewardHeadConfig | None) -> None:
        """Every world model predicts success."""

    def earned(self, future: Future) -> Tensor:
        """[B]: nothing but its end is paid."""
        return future.uncertainty.new_zeros(len(future.uncertainty))

    def paid(self, earned: np.ndarray, success: np.ndarray) -> np.ndarray:
        """float32 [B] for calls that have ``earned`` [B] and of which ``success`` bool [B] succeeded."""
        return success.astype(np.float32)


@dataclass(frozen=True)
class PredictedReward:
    """The sum of the rewards that the world model's head predicts for the actions of the call.

    They are paid together, like success, since a call is predicted once, when its actions are known: paid one by one
    they would depend on how an episode is cut into chunks, and a call that turns out to be uncertain would be paid for.
    """

    def require(self, head: RewardHeadConfig | None) -> None:
        """Raise UserError for a world model whose ``head`` for rewards is None."""
        if head is None:
            raise UserError(
                "the world model has no head for rewards, so imagined rollouts cannot be paid what it predicts; train "
                "one with plan.model.reward=RewardHeadConfig(), or pay for success (plan.imagination.reward)."
            )

    def earned(self, future: Future) -> Tensor:
        """[B]: the predicted rewards of the known actions."""
        assert future.reward is not None  # :meth:`require`
        return future.reward.sum(1)

    def paid(self, earned: np.ndarray, success: np.ndarray) -> np.ndarray:
        """float32 [B]; success ends a rollout and earns what the head says."""
        return earned


Payment: TypeAlias = SuccessReward | PredictedReward
