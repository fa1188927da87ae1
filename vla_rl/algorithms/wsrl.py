"""WSRL, warm-start RL (Zhou et al. 2024, arXiv 2412.07762): offline pre-training whose data are then left behind.

1. Cal-QL, CQL or IQL on recorded data.
2. The recorded data are dropped.
3. Warm-up: the pre-trained policy, frozen, collects ``start`` decisions, so that the critics' first online batches
   hold what this very policy does; without them their values fall as soon as online learning begins.
4. SAC from there, on online data alone: policy, critics, their targets and the temperature go on as they are.
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
from vla_rl.contract.batch import ReplayBuffer
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ReparametrisedPolicy
from vla_rl.policies.critics import QEnsemble


class OfflineConfig(Protocol):
    """The frozen dataclass of an algorithm that can learn from recorded data alone: ``CalQLConfig``, ``IQLConfig``."""

    def build(
        self,
        policy: ReparametrisedPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        generator: torch.Generator,
    ) -> OffPolicy: ...


@runtime_checkable
class Forgetful(ReplayBuffer, Protocol):
    """A memory that can drop its recorded data: a ``Mixture``."""

    def keep_only(self, name: str) -> None: ...


@dataclass(frozen=True)
class WSRLConfig(SACConfig):
    """WSRL's numbers: those of SAC online; ``offline`` has those of ``offline_steps`` before it.

    ``start`` is the warm-up.  Of ``offline``, what concerns collecting (``utd_ratio``, ``start``) and the size of
    the critics has no effect.
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
    """SAC that begins with what another algorithm made of recorded data."""

    config: WSRLConfig

    def pretrain(self, steps: int, report: Callable[[int, dict[str, float]], None] = lambda step, info: None) -> None:
        """Learn offline, then drop the recorded data; raises UserError when the memory holds none apart."""
        if not isinstance(self.replay, Forgetful):
            raise UserError(
                f"WSRL learns from recorded data first and drops them then, but {type(self.replay).__name__} cannot "
                "tell them apart; give it a Mixture, for example by a share of demonstrations above 0."
            )
        built = self.config.offline.build(self.policy, self.parameters, self.critic, self.replay, self.generator)
        built.pretrain(steps, report)
        self.replay.keep_only("online")
        self.target_critic.load_state_dict(built.target_critic.state_dict())
        if isinstance(built, SAC):
            self.log_temperature.data.copy_(built.log_temperature.data)
        self.steps = built.steps
