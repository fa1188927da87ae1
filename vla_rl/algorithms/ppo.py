"""PPO over chunks (Schulman et al. 2017, arXiv 1707.06347) for any policy whose samples have a likelihood.

The decision process is the SMDP of chunks: gamma is per low-level action, lambda per decision (``advantages.py``).

    L_pi = -E[ min(rho A, clip(rho, 1-eps_low, 1+eps_high) A) ],    rho = exp(log pi - log pi_old)
    L_V  = 1/2 E[ (V - return)^2 ]

Deviations from the paper: the log-probability is that of a whole denoising chain (a surrogate for, or equal to, that of
the action; see ``policies/flow.py``); the trust region is held by a stop on the *exact* Gaussian KL of the chains and
by a learning rate that follows it; the value loss is not clipped; every advantage statistic is global.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vla_rl.algorithms.advantages import LamUnit, gae, normalise
from vla_rl.contract.batch import OneProcess, Reducer, Rollout
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import Likelihood, LikelihoodPolicy


@dataclass(frozen=True)
class PPOConfig:
    """Defaults are those of the demo; ``target_kl`` is of the chain, summed over its Gaussian terms."""

    gamma: float = 0.99  # per low-level action
    lam: float = 0.95
    lam_unit: LamUnit = "decision"  # or "action": lam^n for a decision of n actions
    clip_low: float = 0.3
    clip_high: float = 0.3
    epochs: int = 3
    minibatch: int = 320  # decisions
    learning_rate: float = 5e-5
    critic_learning_rate: float = 1e-3
    target_kl: float = 0.04
    stop_kl: float = 4.0  # the policy's epochs end early beyond stop_kl * target_kl
    rate_factor: float = 1.4  # the learning rate moves by this factor when the last epoch's KL misses the target
    rate_bounds: tuple[float, float] = (1e-6, 1e-3)
    entropy: float = 0.0  # weight of the chain's summed entropy (Flow-Noise only: elsewhere the noise is fixed)
    grad_norm: float = 1.0
    critic_warmup: int = 2  # first iterations that train the critic only
    parity_bound: float = 1e-2  # beyond this, old log-probs are recomputed in training precision

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
    ) -> PPO:
        """The learner with these numbers."""
        return PPO(policy, parameters, critic, self, generator)


@dataclass(frozen=True)
class _Batch:
    """The decisions of one rollout, flattened to [B]; idle and intervened ones are left out."""

    stored: dict[str, Tensor]
    sample: Tensor
    aux: Mapping[str, Tensor]
    logprob: Tensor
    advantage: Tensor
    returns: Tensor

    def rows(self, index: Tensor) -> _Batch:
        return _Batch(
            _index(self.stored, index),
            self.sample[index],
            _index(self.aux, index),
            self.logprob[index],
            self.advantage[index],
            self.returns[index],
        )


class PPO:
    """A ``Learner``: ``update(rollout)`` improves ``policy`` and ``critic`` in place and returns metrics.

    Raises UserError when the policy has no likelihood and NonFiniteError when a loss or gradient is not finite; the
    weights are then still those of the last finite step.
    """

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        config: PPOConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        if not isinstance(policy, LikelihoodPolicy):
            raise UserError(
                f"PPO needs a policy with log_prob and kl (LikelihoodPolicy) but {type(policy).__name__} lacks them, "
                "so no ratio can be formed; add them or choose an algorithm for black-box policies."
            )
        self.policy, self.critic, self.config = policy, critic, config
        self.parameters, self.generator = dict(parameters), generator
        self.reducer: Reducer = reducer or OneProcess()
        self.optimiser = torch.optim.Adam(self.parameters.values(), lr=config.learning_rate, eps=1e-5)
        self.critic_optimiser = torch.optim.Adam(critic.parameters(), lr=config.critic_learning_rate, eps=1e-5)
        self.iteration = 0

    @property
    def learning_rate(self) -> float:
        return float(self.optimiser.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        low, high = self.config.rate_bounds
        self.optimiser.param_groups[0]["lr"] = min(max(value, low), high)

    def update(self, rollout: Rollout) -> dict[str, float]:
        """One PPO iteration: advantages, then epochs of freshly drawn minibatches.

        Without a usable decision (all idle or intervened) nothing is learnt and only ``decisions`` = 0 is returned.
        """
        batch, metrics = self._prepare(rollout)
        if not metrics["decisions"]:
            return metrics
        old = self._old_likelihood(batch, metrics)
        if metrics["parity"] > self.config.parity_bound:
            batch = replace(batch, logprob=old.logprob)
        kl, stopped = 0.0, self.iteration < self.config.critic_warmup
        warming = stopped
        losses: list[dict[str, float]] = []
        for _ in range(self.config.epochs):
            epoch_kl: list[float] = []
            for index in self._minibatches(len(batch.logprob)):
                row = batch.rows(index)
                losses.append(self._critic_step(row))
                if not stopped:
                    info = self._policy_step(row, _index(old.params, index))
                    epoch_kl.append(info["kl"])
                    losses.append(info)
                    stopped = info["kl"] > self.config.stop_kl * self.config.target_kl
            kl = sum(epoch_kl) / len(epoch_kl) if epoch_kl else kl
        if not warming:
            self._adapt_rate(kl, stopped)
        self.iteration += 1
        state = {"kl_last": kl, "stopped": float(stopped), "learning_rate": self.learning_rate}
        return {**metrics, **_mean(losses), **state}

    # -- data -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _prepare(self, rollout: Rollout) -> tuple[_Batch, dict[str, float]]:
        calibrate = getattr(self.critic, "calibrate", None)
        if self.iteration == 0 and callable(calibrate):
            calibrate(rollout.stored)
        values = self.critic(rollout.stored)
        value, following = values[:-1], values[1:].clone()
        if len(rollout.final_index):
            following[rollout.final_index[:, 0], rollout.final_index[:, 1]] = self.critic(rollout.final_stored)
        advantage, returns = gae(
            rollout.reward,
            rollout.valid,
            rollout.terminated,
            rollout.truncated,
            value,
            following,
            self.config.gamma,
            self.config.lam,
            self.config.lam_unit,
        )
        usable = rollout.valid.any(-1) & ~rollout.intervened.any(-1)
        normalised = normalise(advantage, usable, self.reducer)
        stored = {name: item[:-1][usable] for name, item in rollout.stored.items()}
        batch = _Batch(
            stored,
            rollout.sample[usable],
            _index(rollout.aux, usable),
            rollout.logprob[usable],
            normalised[usable],
            returns[usable],
        )
        return batch, _quality(returns[usable], value[usable])

    @torch.no_grad()
    def _old_likelihood(self, batch: _Batch, metrics: dict[str, float]) -> Likelihood:
        old = self.policy.log_prob(batch.stored, batch.sample, batch.aux)
        metrics["parity"] = float((old.logprob - batch.logprob).abs().max())
        metrics["entropy"] = float(old.entropy.mean())
        if "std" in old.params:
            metrics["noise_std"] = float(old.params["std"].mean())
        return old

    def _minibatches(self, size: int) -> Iterator[Tensor]:
        """A new permutation at every call, cut into parts of nearly equal size."""
        order = torch.randperm(size, generator=self.generator)
        yield from order.tensor_split(max(1, round(size / self.config.minibatch)))

    # -- losses -----------------------------------------------------------------------------------------------------

    def policy_loss(self, row: _Batch, new: Likelihood) -> tuple[Tensor, Tensor]:
        """The clipped surrogate and which samples were clipped."""
        ratio = (new.logprob - row.logprob).exp()
        clipped = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        objective = torch.minimum(ratio * row.advantage, clipped * row.advantage)
        return -objective.mean(), (ratio != clipped).float()

    def _policy_step(self, row: _Batch, old: Mapping[str, Tensor]) -> dict[str, float]:
        new = self.policy.log_prob(row.stored, row.sample, row.aux)
        kl = self.policy.kl(old, new.params).mean()
        loss, clipped = self.policy_loss(row, new)
        loss = loss - self.config.entropy * new.entropy.mean()
        norm = self._step(self.optimiser, loss, self.parameters, "policy")
        seen = {"kl": float(kl.detach()), "clipped": float(clipped.mean()), "policy_loss": float(loss.detach())}
        return {**seen, "grad_norm": norm}

    def _critic_step(self, row: _Batch) -> dict[str, float]:
        loss = 0.5 * (self.critic(row.stored) - row.returns).square().mean()
        self._step(self.critic_optimiser, loss, dict(self.critic.named_parameters()), "critic")
        return {"value_loss": float(loss.detach())}

    def _step(
        self, optimiser: torch.optim.Optimizer, loss: Tensor, parameters: Mapping[str, nn.Parameter], who: str
    ) -> float:
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(parameters.values(), self.config.grad_norm))
        if not torch.isfinite(loss) or norm != norm or norm == float("inf"):
            bad = next((n for n, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()), "loss")
            raise NonFiniteError(
                f"the {who} gradient of {bad!r} is not finite in iteration {self.iteration}, so the step was not "
                "taken; go on from the last checkpoint with a lower learning rate."
            )
        optimiser.step()
        return norm

    def _adapt_rate(self, kl: float, stopped: bool) -> None:
        if stopped or kl > 1.5 * self.config.target_kl:
            self.learning_rate /= self.config.rate_factor
        elif kl < 0.67 * self.config.target_kl:
            self.learning_rate *= self.config.rate_factor


def _index(items: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {name: item[index] for name, item in items.items()}


def _quality(returns: Tensor, value: Tensor) -> dict[str, float]:
    """How many decisions there are to learn from and how well the critic ``value`` [B] explains ``returns`` [B]."""
    if not len(returns):
        return {"decisions": 0.0}
    unexplained = (returns - value).var(correction=0) / returns.var(correction=0).clamp_min(1e-8)
    explained = {"explained_variance": float(1 - unexplained), "value": float(value.mean())}
    return {"decisions": float(len(returns)), **explained}


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    values = {name: [row[name] for row in rows if name in row] for name in sorted(names)}
    return {name: sum(items) / len(items) for name, items in values.items()}
