"""WSRL, warm-start RL (Zhou et al. 2024, arXiv 2412.07762): offline pre-training, then SAC without the offline data.

1. Cal-QL, CQL or IQL on recorded data.
2. Drop the recorded data.
3. Warm-up: the frozen pre-trained policy collects ``learning_starts`` decisions, so that the critics' first online
   batches come from this policy; otherwise their values collapse when online learning starts.
4. SAC on online data alone, from the pre-trained policy, critics, targets and temperature.

Cal-QL (Nakamoto et al. 2023, arXiv 2303.05479): CQL (Kumar et al. 2020, arXiv 2006.04779), calibrated, on SAC.

    y   = R + gamma^m (1 - terminated) max_{i <= n} min_{k in M} Q'_k(o', a'_i),  a'_i ~ pi(.|o')
    L_Q = sum_k E (Q_k(o, a) - y)^2
          + alpha sum_k E [log sum_i exp(Q~_k(o, a_i) - log mu(a_i)) - Q_k(o, a)]
    Q~(o, a_i) = max(Q(o, a_i), G(o)) for actions of the policy, Q(o, a_i) for uniform ones

The ``a_i`` are n uniform actions, n of pi(.|o) and n of pi(.|o'), and ``mu`` is the density each was drawn from: the
sum estimates the integral of exp Q over all actions.  G is the return of the recorded episode from o on, a lower bound
of the optimal value: the penalty does not push values below it, so online learning does not start with values that
are too low.  Where the return is unknown (-inf, a truncated episode) there is no bound, as in CQL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.sac import SAC, SACConfig
from vla_rl.contract.batch import Reducer, ReplayBuffer, Transitions
from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import CriticAction, ReparametrisedPolicy
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.noise import uniform


@dataclass(frozen=True)
class CalQLConfig(SACConfig):
    """Cal-QL's defaults; the loss is the same in the ``offline_steps`` and online."""

    num_critics: int = 10
    lr: float = 1e-4
    conservatism: float = 5.0  # alpha of the penalty
    actions: int = 10  # n

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, conservatism=(0, math.inf))
        check_limits(self, actions=(1, math.inf))

    @property
    def learner(self) -> type[CalQL]:
        return CalQL


class CalQL(SAC):
    """SAC with a penalty on the values of unrecorded actions, and without entropy in the targets."""

    config: CalQLConfig

    @torch.no_grad()
    def target(self, batch: Transitions) -> Tensor:
        sampled = self._sample(batch.next_features)
        values = self.min_target_q(repeated(batch.next_features, self.config.actions), sampled.action)
        return batch.reward + batch.discount * values.view(-1, self.config.actions).amax(1)

    def regularizer(self, batch: Transitions, value: Tensor) -> Tensor:
        """The penalty, given the critics' ``value`` [K,B] of the recorded actions."""
        count, size = self.config.actions, value.shape[1]
        with torch.no_grad():
            current, upcoming = self._sample(batch.features), self._sample(batch.next_features)
            anywhere = 2.0 * uniform(current.action.shape, self.generator, like=current.action) - 1.0
        entries = anywhere.shape[-1]
        candidates = (anywhere, current.action, upcoming.action)
        actions = torch.cat([part.view(size, count, entries) for part in candidates], 1)
        values = self.critic(repeated(batch.features, 3 * count), actions.flatten(0, 1)).view(-1, size, 3 * count)
        logprob = torch.cat([part.logprob.view(size, count) for part in (current, upcoming)], 1)
        of_uniform, of_policy = values.split([count, 2 * count], 2)
        penalty = conservative_penalty(of_uniform, of_policy, logprob, value, batch.returns, entries)
        return self.config.conservatism * penalty.mean(1).sum()

    def _sample(self, features: Mapping[str, Tensor]) -> CriticAction:
        """``n`` decisions per observation: action [B*n,A], logprob [B*n], those of one observation adjacent."""
        return self.policy.rsample(repeated(features, self.config.actions), self.generator)


def conservative_penalty(
    uniform: Tensor, policy: Tensor, logprob: Tensor, recorded: Tensor, bound: Tensor, entries: int
) -> Tensor:
    """The log-sum-exp value of all actions minus the value of the recorded one, [K,B].

    The arguments are values: ``uniform`` [K,B,N] of actions drawn uniformly from [-1, 1]^entries, ``policy`` [K,B,M]
    of the policy's actions, drawn with ``logprob`` [B,M] and raised to at least ``bound`` [B], and ``recorded`` [K,B].
    The bound precedes the importance weight: it is a bound of values.
    """
    bounded = torch.maximum(policy, bound[:, None]) - logprob
    weighted = torch.cat([uniform - entries * math.log(0.5), bounded], -1)
    return weighted.logsumexp(-1) - recorded


def repeated(features: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Every observation ``count`` times, copies adjacent."""
    return {name: item.repeat_interleave(count, 0) for name, item in features.items()}


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
