"""PPO over action chunks (Schulman et al. 2017, arXiv 1707.06347) for any policy whose samples have a likelihood.

The decision process is the SMDP of chunks: gamma is per low-level action, lambda per decision.

    L_pi = -E[ min(rho A, clip(rho, 1-eps_low, 1+eps_high) A) ],    rho = exp(log pi - log pi_old)
    L_V  = 1/2 E[ (V - return)^2 ]

A return is cut where a person intervenes: the decision before bootstraps from the critic's value of the observation at
which the person took over, so a rescue is not credited to the policy.  Intervened decisions have no loss.

Deviations from the paper: a stop on the exact KL of the chains and a learning rate that adapts to it bound the update
(``policy_gradient.py``); the value loss is not clipped; advantage statistics are global.

Advantages of chunked decisions (a semi-Markov decision process): GAE with true durations, and global normalisation.

Shapes: ``T`` decisions, ``E`` environments, ``H`` actions in a chunk.  Equations: Schulman et al., arXiv 1506.02438,
with the duration of a decision, its number of valid actions ``n``, in the discount (Sutton, Precup, Singh 1999).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vla_rl.algorithms.decisions import Decisions, Gathered, flatten, micro_batches, select_each
from vla_rl.algorithms.policy_gradient import PolicyGradient, PolicyGradientConfig, clipped_objective, surrogate
from vla_rl.contract.batch import Reducer, Rollout
from vla_rl.contract.config import above_zero, at_least, within
from vla_rl.contract.policy import Likelihood, LikelihoodPolicy, Observer, public


@dataclass(frozen=True)
class PPOConfig(PolicyGradientConfig):
    """The defaults, inherited ones included, are the demo's."""

    gamma: float = within(0.99, 0, 1)  # per low-level action
    lam: float = within(0.95, 0, 1)
    clip_low: float = above_zero(0.3, 1)
    clip_high: float = above_zero(0.3)
    critic_lr: float = above_zero(1e-3)
    critic_warmup: int = at_least(2, 0)  # first iterations, which train the critic only


@dataclass(frozen=True)
class _Batch(Decisions):
    """``returns`` [B]: the critic's targets."""

    returns: Tensor


class PPO(PolicyGradient[_Batch], config=PPOConfig):
    """A ``Learner``: ``update(rollout)`` improves ``policy`` and ``critic`` in place and returns metrics."""

    config: PPOConfig
    resumed = (*PolicyGradient.resumed, "critic")

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        config: PPOConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__(policy, parameters, critic, config, generator, reducer)
        self.critic = critic
        self._critic_parameters = {name: item for name, item in critic.named_parameters() if item.requires_grad}
        self.optimizer.add_param_group({"params": list(self._critic_parameters.values()), "lr": config.critic_lr})

    @torch.no_grad()
    def _make_batch(self, rollout: Rollout) -> tuple[_Batch, dict[str, float]]:
        if self.iteration == 0:
            self._calibrate(rollout.features)
        metrics: dict[str, float] = {}
        usable, age = self._usable(rollout, metrics)
        advantage, returns, value = self._credited(rollout, usable)
        batch = _Batch(
            Gathered.where(rollout.features, usable),
            flatten(rollout.sample, usable),
            {name: flatten(item, usable) for name, item in rollout.aux.items()},
            flatten(rollout.logprob, usable),
            advantage,
            flatten(torch.ones_like(usable, dtype=rollout.logprob.dtype), usable),
            flatten(age, usable),
            flatten(rollout.valid, usable),
            returns,
        )
        return batch, {**metrics, **_quality(returns, value)}

    def _credited(self, rollout: Rollout, usable: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised advantages, returns and the critic's values of the ``usable`` [T,E] decisions, each [B]."""
        size = rollout.valid[..., 0].numel()
        values = self._fitting(lambda: self._values(rollout.features, rollout.valid.shape[1]), size)
        value, next_value = values[:-1], values[1:].clone()
        if len(rollout.final_index):
            next_value[rollout.final_index[:, 0], rollout.final_index[:, 1]] = self._values(rollout.final_features)
        intervened = rollout.intervened.any(-1)
        advantage, returns = gae(
            rollout.reward,
            rollout.valid & ~intervened[..., None],
            rollout.terminated,
            rollout.truncated | intervened,
            value,
            next_value,
            self.config.gamma,
            self.config.lam,
        )
        normalized = normalize(advantage, usable, self.reducer)
        return flatten(normalized, usable), flatten(returns, usable), flatten(value, usable)

    def _values(self, features: Mapping[str, Tensor], width: int = 1) -> Tensor:
        """The critic's values of {name: [N,width,...]} or {name: [N,...]}, about ``micro_batch`` at a time."""
        step = max(1, self.micro_batch // max(1, width)) if self.micro_batch else 0
        parts = [
            self.critic(dict(features) if index is None else select_each(features, index))
            for index, _ in micro_batches(len(next(iter(features.values()))), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _calibrate(self, features: Mapping[str, Tensor]) -> None:
        """Fit the input normalization of the critic, and of a policy whose actions it leaves unchanged."""
        before = {name: item.detach().clone() for name, item in self.parameters.items() if name not in self.learnt}
        for module, inputs in ((self.critic, features), (self.policy, public(dict(features)))):
            calibrate = getattr(module, "calibrate", None)
            if callable(calibrate):
                calibrate(inputs, self.reducer)
        changed = {name for name, value in before.items() if not torch.equal(self.parameters[name], value)}
        self.calibration = {name: self.parameters[name].detach().clone() for name in sorted(changed)}

    def _observers(self) -> list[Observer]:
        return super()._observers() + ([self.critic] if isinstance(self.critic, Observer) else [])

    def _in_warmup(self) -> bool:
        return self.iteration < self.config.critic_warmup

    def critic_loss(self, minibatch: _Batch) -> Tensor:
        """Half the mean squared error of its values."""
        return 0.5 * (self.critic(minibatch.features) - minibatch.returns).square().mean()

    def policy_loss(self, minibatch: _Batch, new: Likelihood) -> tuple[Tensor, Tensor]:
        """The negative clipped surrogate, and the clipped share of each sample's parts."""
        return surrogate(minibatch, new.logprob, self.objective)

    def objective(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """The clipped surrogate and where it was clipped, in the shape of ``ratio``."""
        return clipped_objective(ratio, advantage, self.config.clip_low, self.config.clip_high)


@dataclass(frozen=True)
class RecomputingPPOConfig(PPOConfig):
    """PPO that computes advantages and returns anew in every epoch."""


class RecomputingPPO(PPO, config=RecomputingPPOConfig):
    """Every epoch has the advantages and returns of the critic as it is then (Andrychowicz et al. 2021, 2006.05990)."""

    @torch.no_grad()
    def _at_epoch(self, epoch: int, batch: _Batch, rollout: Rollout) -> _Batch:
        if not epoch:
            return batch
        usable, _ = self._usable(rollout, {})
        advantage, returns, _ = self._credited(rollout, usable)
        return replace(batch, advantage=advantage, returns=returns)


def _quality(returns: Tensor, value: Tensor) -> dict[str, float]:
    """The number of usable decisions, and how well the critic's ``value`` [B] explains ``returns`` [B]."""
    if not len(returns):
        return {"rollout/decisions": 0.0}
    unexplained = (returns - value).var(correction=0) / returns.var(correction=0).clamp_min(1e-8)
    explained = {"critic/explained_variance": float(1 - unexplained), "critic/value": float(value.mean())}
    return {"rollout/decisions": float(len(returns)), **explained}


def chunk_reward(reward: Tensor, valid: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """``R = sum_i gamma^i r_i`` over the valid actions and ``n``, their number; [...,H] -> float64 and int64 [...].

    Rewards where ``valid`` is False are ignored, NaN included.
    """
    exponent = (valid.long().cumsum(-1) - 1).clamp(min=0).double()
    masked = torch.where(valid, reward.double(), 0.0)
    return (torch.pow(gamma, exponent) * masked).sum(-1), valid.sum(-1)


def gae(
    reward: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    value: Tensor,
    next_value: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantage and return, both [T,E] in the dtype of ``value``; computed in float64.

    reward, valid         [T,E,H]  valid is False for actions that were not executed
    terminated, truncated bool [T,E]  the episode ended at this decision; if both, terminated wins
    value                 [T,E]    V of the observation of the decision
    next_value            [T,E]    V of the observation after the decision (at the end of an episode its last one, not
                                   the first one of the next); ignored where terminated
    gamma                 discount per low-level action
    lam                   per decision

    ``delta = R + gamma^n V_next - V`` and ``A_j = delta_j + gamma^n lam A_{j+1}``, cut at the end of an episode.
    A decision without valid actions has advantage 0 and is skipped; its end flag still separates two episodes.
    """
    chunk, count = chunk_reward(reward, valid, gamma)
    discount = torch.pow(gamma, count.double())
    bootstrap = torch.where(terminated, 0.0, next_value.double())
    delta = chunk + discount * bootstrap - value.double()
    ended = terminated | truncated
    advantage = _accumulate(delta, torch.where(ended, 0.0, discount * lam), count > 0, ended)
    return advantage.to(value.dtype), (advantage + value.double()).to(value.dtype)


def _accumulate(delta: Tensor, carry: Tensor, live: Tensor, ended: Tensor) -> Tensor:
    """``A_j = delta_j + carry_j A_{j+1}`` over the live decisions, 0 at the others, all [T,E]."""
    # A decision that is not live hands on what comes after it, unless an episode ended there.
    own, factor = torch.where(live, delta, 0.0), torch.where(live, carry, (~ended).to(carry))
    found, after = [], torch.zeros_like(delta[0])
    for here, share in zip(reversed(own.unbind()), reversed(factor.unbind()), strict=True):
        after = torch.addcmul(here, share, after)
        found.append(after)
    return torch.where(live, torch.stack(found[::-1]), 0.0)


def normalize(advantage: Tensor, mask: Tensor, reducer: Reducer) -> Tensor:
    """``(A - mean) / (std + 1e-8)`` where ``mask``, 0 elsewhere; same shape and dtype as ``advantage``.

    Mean and population std are over all processes, summed in float64 in two passes, so that the result does not depend
    on their number.
    """
    values = torch.where(mask, advantage.double(), 0.0)
    total, count = reducer.sum(torch.stack([values.sum(), mask.sum().double()])).unbind()
    mean = total / count.clamp(min=1.0)
    centred: Tensor = torch.where(mask, values - mean, 0.0)
    std: Tensor = (reducer.sum(centred.square().sum()) / count.clamp(min=1.0)).sqrt()
    return (centred / (std + 1e-8)).to(advantage.dtype)
