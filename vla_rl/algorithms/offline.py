"""Algorithms that begin with, or need no more than, recorded data: Cal-QL, IQL, WSRL.

WSRL, warm-start RL (Zhou et al. 2024, arXiv 2412.07762): offline pre-training, then SAC without the offline data.

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

IQL, implicit Q-learning (Kostrikov, Nair & Levine 2021, arXiv 2110.06169), offline and online.

    L_V  = E |tau - 1(u < 0)| u^2,  u = min_{k in M} Q'_k(o, a) - V(o)
    L_Q  = sum_k E (Q_k(o, a) - R - gamma^m (1 - terminated) V(o'))^2
    L_pi = -E [min(exp(beta A), limit) log pi(a|o)],  A = min_{k in M} Q'_k(o, a) - V(o)

All three losses use recorded actions only, so critics are never evaluated at untried actions.  Of a chunk that its
episode's end cut short, ``log pi`` is the sum over the actions that were executed; critics read the rest as well, which
changes no target.  Deviation: any number of critics, with the minimum over a random subset (two of two in the paper).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig
from vla_rl.algorithms.sac import SAC, SACConfig
from vla_rl.contract.batch import Transitions
from vla_rl.contract.config import above_zero, at_least
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import CriticAction
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.noise import uniform


@dataclass(frozen=True)
class CalQLConfig(SACConfig):
    """Cal-QL's defaults; the loss is the same in the ``offline_steps`` and online."""

    num_critics: int = 10
    lr: float = 1e-4
    conservatism: float = at_least(5.0, 0)  # alpha of the penalty
    actions: int = at_least(10, 1)  # n


class CalQL(SAC, config=CalQLConfig):
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
    offline: OffPolicyConfig = field(default_factory=CalQLConfig)


class WSRL(SAC, config=WSRLConfig):
    """SAC that starts from offline pre-training by another algorithm."""

    config: WSRLConfig

    def pretrain(self, steps: int, report: Callable[[int, dict[str, float]], None] = lambda step, info: None) -> None:
        """Learn offline, then drop the recorded data; raises UserError when they have no part of their own."""
        if not hasattr(self.replay, "keep_only"):
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


@dataclass(frozen=True)
class IQLConfig(OffPolicyConfig):
    """IQL's defaults; ``offline_steps`` learn from a dataset alone."""

    utd_ratio: float = 1.0
    critic_warmup: int = 0
    policy_delay: int = 1
    num_critics: int = 2
    expectile: float = above_zero(0.9, 1)  # tau
    beta: float = at_least(10.0, 0)  # inverse temperature of the advantage weights
    weight_limit: float = above_zero(100.0)


class IQL(OffPolicy, config=IQLConfig):
    """Trains a policy on recorded decisions; raises UserError when it has no density of them."""

    config: IQLConfig
    policy: Any  # a ReparametrisedPolicy with log_prob_of
    needs = ("rsample", "critic_action", "log_prob_of")
    otherwise = (
        "so no recorded action could be imitated; add it or choose an algorithm that uses the critics' gradient."
    )
    resumed = (*OffPolicy.resumed, "value", "value_optimizer")
    rolled_back = (*OffPolicy.rolled_back, "value")

    def prepare(self) -> None:
        super().prepare()
        self.value = ValueCritic(self.critic.inputs.sizes, self.config.critic.width, self.config.critic.depth)
        self.value.to(next(self.critic.parameters()).device)
        self._value_parameters = {name: item for name, item in self.value.named_parameters() if item.requires_grad}
        self.value_optimizer = torch.optim.Adam(self._value_parameters.values(), lr=self.config.critic_lr, fused=True)

    def critic_step(self, batch: Transitions) -> dict[str, float]:
        """A step of V, then one of the critics."""
        with torch.no_grad():
            min_q = self.min_target_q(
                batch.features, self.policy.critic_action(batch.features, batch.sample, batch.executed)
            )
        loss = expectile_loss(min_q - self.value(batch.features), self.config.expectile).mean()
        self.optimizer_step(self.value_optimizer, loss, self._value_parameters, "value")
        return {"critic/value_loss": float(loss.detach()), **super().critic_step(batch)}

    @torch.no_grad()
    def target(self, batch: Transitions) -> Tensor:
        next_value: Tensor = self.value(batch.next_features)
        return batch.reward + batch.discount * next_value

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, dict[str, float]]:
        action = self.policy.critic_action(batch.features, batch.sample, batch.executed)
        with torch.no_grad():
            advantage = self.min_target_q(batch.features, action) - self.value(batch.features)
            weight = (self.config.beta * advantage).exp().clamp_max(self.config.weight_limit)
        executed = torch.arange(batch.executed.shape[1], device=batch.count.device) < batch.count[:, None]
        density = self.policy.log_prob_of(batch.features, action).unflatten(-1, (executed.shape[1], -1)).sum(-1)
        loss = -(weight * torch.where(executed, density, 0.0).sum(-1)).mean()
        return loss, {"policy/advantage_weight": float(weight.mean()), "policy/advantage": float(advantage.mean())}

    def input_normalizers(self) -> list[Any]:
        return [*super().input_normalizers(), self.value]


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """``|tau - 1(u < 0)| u^2`` of errors ``u``, minimal at the tau-expectile (the mean for tau = 1/2)."""
    return torch.where(error < 0, 1.0 - expectile, expectile) * error.square()
