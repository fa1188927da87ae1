"""PPO over chunks (Schulman et al. 2017, arXiv 1707.06347) for any policy whose samples have a likelihood.

The decision process is the SMDP of chunks: gamma is per low-level action, lambda per decision (``advantages.py``).

    L_pi = -E[ min(rho A, clip(rho, 1-eps_low, 1+eps_high) A) ],    rho = exp(log pi - log pi_old)
    L_V  = 1/2 E[ (V - return)^2 ]

Deviations from the paper: the trust region is held by a stop on the exact KL of the chains and by a learning rate that
follows it (``policy_gradient.py``); the value loss is not clipped; every advantage statistic is global.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.advantages import LambdaPer, gae, normalize
from vla_rl.algorithms.policy_gradient import (
    Decisions,
    PolicyGradient,
    PolicyGradientConfig,
    by_row,
    clipped_objective,
)
from vla_rl.contract.batch import Reducer, Rollout
from vla_rl.contract.policy import Likelihood, LikelihoodPolicy, Observer, public


@dataclass(frozen=True)
class PPOConfig(PolicyGradientConfig):
    """Defaults, inherited ones included, are those of the demo."""

    gamma: float = 0.99  # per low-level action
    lam: float = 0.95
    lambda_per: LambdaPer = "decision"  # or "action": lam^n for a decision of n actions
    clip_low: float = 0.3
    clip_high: float = 0.3
    critic_lr: float = 1e-3
    critic_warmup: int = 2  # first iterations that train the critic only

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
        reducer: Reducer,
    ) -> PPO:
        """The learner with these numbers."""
        return PPO(policy, parameters, critic, self, generator, reducer)


@dataclass(frozen=True)
class _Batch(Decisions):
    """What the critic learns as well, [B]."""

    returns: Tensor


class PPO(PolicyGradient[_Batch]):
    """A ``Learner``: ``update(rollout)`` improves ``policy`` and ``critic`` in place and returns metrics."""

    config: PPOConfig

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        config: PPOConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__(policy, parameters, config, generator, reducer)
        self.critic = critic
        self._of_critic = {name: item for name, item in critic.named_parameters() if item.requires_grad}
        self.critic_optimizer = torch.optim.Adam(self._of_critic.values(), lr=config.critic_lr, eps=1e-5)

    def state_dict(self) -> dict[str, Any]:
        own = {"critic": self.critic.state_dict(), "critic_optimizer": self.critic_optimizer.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.critic.load_state_dict(state["critic"])
        self.critic_optimizer.load_state_dict(state["critic_optimizer"])

    @torch.no_grad()
    def _make_batch(self, rollout: Rollout) -> tuple[_Batch, dict[str, float]]:
        if self.iteration == 0:
            self._calibrate(rollout.features)
        values = self.critic(rollout.features)
        value, next_value = values[:-1], values[1:].clone()
        if len(rollout.final_index):
            next_value[rollout.final_index[:, 0], rollout.final_index[:, 1]] = self.critic(rollout.final_features)
        advantage, returns = gae(
            rollout.reward,
            rollout.valid,
            rollout.terminated,
            rollout.truncated,
            value,
            next_value,
            self.config.gamma,
            self.config.lam,
            self.config.lambda_per,
        )
        usable = rollout.valid.any(-1) & ~rollout.intervened.any(-1)
        normalized = normalize(advantage, usable, self.reducer)
        batch = _Batch(
            {name: by_row(item[:-1], usable) for name, item in rollout.features.items()},
            by_row(rollout.sample, usable),
            {name: by_row(item, usable) for name, item in rollout.aux.items()},
            by_row(rollout.logprob, usable),
            by_row(normalized, usable),
            by_row(returns, usable),
        )
        return batch, _quality(batch.returns, by_row(value, usable))

    def _calibrate(self, features: Mapping[str, Tensor]) -> None:
        """Standardise what the critic sees, and the policy if its actions stay the same by it."""
        for part, seen in ((self.critic, features), (self.policy, public(dict(features)))):
            calibrate = getattr(part, "calibrate", None)
            if callable(calibrate):
                calibrate(seen, self.reducer)

    def _observers(self) -> list[Observer]:
        return super()._observers() + ([self.critic] if isinstance(self.critic, Observer) else [])

    def _in_warmup(self) -> bool:
        return self.iteration < self.config.critic_warmup

    def _critic_step(self, row: _Batch, share: float) -> dict[str, float]:
        loss = torch.zeros(())
        if share:
            loss = share * 0.5 * (self.critic(row.features) - row.returns).square().mean()
        self._step(self.critic_optimizer, loss, self._of_critic, "critic")
        return {"value_loss": self._sum(float(loss.detach()))}

    def policy_loss(self, row: _Batch, new: Likelihood) -> tuple[Tensor, Tensor]:
        """The clipped surrogate and which samples were clipped."""
        ratio = (new.logprob - row.logprob).exp()
        objective, clipped = clipped_objective(ratio, row.advantage, self.config.clip_low, self.config.clip_high)
        return -objective.mean(), clipped


def _quality(returns: Tensor, value: Tensor) -> dict[str, float]:
    """How many decisions there are to learn from and how well the critic ``value`` [B] explains ``returns`` [B]."""
    if not len(returns):
        return {"decisions": 0.0}
    unexplained = (returns - value).var(correction=0) / returns.var(correction=0).clamp_min(1e-8)
    explained = {"explained_variance": float(1 - unexplained), "value": float(value.mean())}
    return {"decisions": float(len(returns)), **explained}
