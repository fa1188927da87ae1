"""WSRL, warm-start RL (Zhou et al. 2024, arXiv 2412.07762): offline pre-training, then SAC without the offline data.

1. Cal-QL, CQL or IQL on recorded data.
2. Drop the recorded data.
3. Warm-up: the frozen pre-trained policy collects ``learning_starts`` decisions, so that the critics' first online
   batches come from this policy; otherwise their values collapse when online learning starts.
4. SAC on online data alone, from the pre-trained policy, critics, targets and temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from vla_rl.algorithms.cal_ql import CalQLConfig
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.sac import SAC, SACConfig
from vla_rl.contract.batch import Reducer, ReplayBuffer
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ReparametrisedPolicy
from vla_rl.policies.critics import QEnsemble


class OfflineConfig(Protocol):
    """The config of an algorithm that learns from recorded data alone: ``CalQLConfig``, ``IQLConfig``."""

    def build(
        self,
        policy: ReparametrisedPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> OffPolicy: ...


@runtime_checkable
class MixedReplay(ReplayBuffer, Protocol):
    """A replay buffer of named parts that can drop all but one: a ``Mixture``."""

    def keep_only(self, name: str) -> None: ...


@dataclass(frozen=True)
class WSRLConfig(SACConfig):
    """SAC's fields apply online; ``offline`` is the config of the ``offline_steps`` before.

    ``learning_starts`` is the length of the warm-up.  The fields of ``offline`` for collection (``utd_ratio``,
    ``learning_starts``) and for the size of the critics have no effect.
    """

    batch: int = 1024
    utd_ratio: float = 4.0
    policy_delay: int = 4
    learning_starts: int = 5000
    num_critics: int = 10
    lr: float = 1e-4
    offline_steps: int = 1_000_000
    offline: OfflineConfig = field(default_factory=CalQLConfig)

    @property
    def learner(self) -> type[WSRL]:
        return WSRL


class WSRL(SAC):
    """SAC that starts from offline pre-training by another algorithm."""

    config: WSRLConfig

    def pretrain(self, steps: int, report: Callable[[int, dict[str, float]], None] = lambda step, info: None) -> None:
        """Learn offline, then drop the recorded data; raises UserError when they have no part of their own."""
        if not isinstance(self.replay, MixedReplay):
            raise UserError(
                f"WSRL learns from recorded data and then drops them, but {type(self.replay).__name__} does not keep "
                "them apart; give it a Mixture, for example by a share of demonstrations above 0."
            )
        offline = self.config.offline.build(
            self.policy, self.parameters, self.critic, self.replay, self.generator, self.reducer
        )
        offline.pretrain(steps, report)
        self.replay.keep_only("online")
        self.target_critic.load_state_dict(offline.target_critic.state_dict())
        if isinstance(offline, SAC):
            self.log_temperature.data.copy_(offline.log_temperature.data)
        self.steps = offline.steps
