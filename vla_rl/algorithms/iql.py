"""IQL, implicit Q-learning (Kostrikov, Nair & Levine 2021, arXiv 2110.06169), offline and online.

    L_V  = E |tau - 1(u < 0)| u^2,  u = min_{k in M} Q'_k(o, a) - V(o)
    L_Q  = sum_k E (Q_k(o, a) - R - gamma^m (1 - terminated) V(o'))^2
    L_pi = -E [min(exp(beta A), limit) log pi(a|o)],  A = min_{k in M} Q'_k(o, a) - V(o)

All three losses use recorded actions only, so critics are never evaluated at untried actions.  Of a chunk that its
episode's end cut short, ``log pi`` is the sum over the actions that were executed; critics read the rest as well, which
changes no target.  Deviation: any number of critics, with the minimum over a random subset (two of two in the paper).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig
from vla_rl.contract.batch import Reducer, ReplayBuffer, Transitions
from vla_rl.contract.config import check_limits, check_positive
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Features, ReparametrisedPolicy
from vla_rl.policies.critics import QEnsemble, ValueCritic


@runtime_checkable
class ScoringPolicy(ReparametrisedPolicy, Protocol):
    """A policy that has a density of recorded decisions, as IQL needs."""

    def log_prob_of(self, features: Features, action: Any) -> Any:
        """Log-densities [B,A] of the entries of decisions in the space of ``critic_action``, with gradient."""


@dataclass(frozen=True)
class IQLConfig(OffPolicyConfig):
    """IQL's defaults; ``offline_steps`` learn from a dataset alone."""

    utd_ratio: float = 1.0
    critic_warmup: int = 0
    policy_delay: int = 1
    num_critics: int = 2
    expectile: float = 0.9  # tau
    beta: float = 10.0  # inverse temperature of the advantage weights
    weight_limit: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "expectile")
        check_limits(self, expectile=(0, 1))
        check_limits(self, beta=(0, math.inf))
        check_positive(self, "weight_limit")

    @property
    def learner(self) -> type[IQL]:
        return IQL


class IQL(OffPolicy):
    """Trains a policy on recorded decisions; raises UserError when it has no density of them."""

    config: IQLConfig
    policy: ScoringPolicy

    def __init__(
        self,
        policy: ScoringPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: QEnsemble,
        replay: ReplayBuffer,
        config: IQLConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__(policy, parameters, critic, replay, config, generator, reducer)
        if not isinstance(policy, ScoringPolicy):
            raise UserError(
                f"IQL needs a policy with log_prob_of (ScoringPolicy) but {type(policy).__name__} lacks it, so no "
                "recorded action could be imitated; add it or choose an algorithm that uses the critics' gradient."
            )
        self.value = ValueCritic(critic.inputs.sizes, config.critic.width, config.critic.depth)
        self.value.to(next(critic.parameters()).device)
        self._value_parameters = {name: item for name, item in self.value.named_parameters() if item.requires_grad}
        self.value_optimizer = torch.optim.Adam(self._value_parameters.values(), lr=config.critic_lr, fused=True)

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

    def _networks(self) -> dict[str, nn.Module]:
        return {**super()._networks(), "value": self.value}

    def state_dict(self) -> dict[str, Any]:
        own = {"value": self.value.state_dict(), "value_optimizer": self.value_optimizer.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.value.load_state_dict(state["value"])
        self.value_optimizer.load_state_dict(state["value_optimizer"])


def expectile_loss(error: Tensor, expectile: float) -> Tensor:
    """``|tau - 1(u < 0)| u^2`` of errors ``u``, minimal at the tau-expectile (the mean for tau = 1/2)."""
    return torch.where(error < 0, 1.0 - expectile, expectile) * error.square()
