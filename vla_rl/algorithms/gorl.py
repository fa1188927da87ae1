"""GoRL: PPO on the latent noise alternates with flow matching of the decoder (Zhang et al. 2025, arXiv 2512.02581).

A stage of PPO trains the encoder ``w ~ N(mu(o), sigma^2)`` of a frozen decoder ``g``, so that ratios are exact, with a
penalty on its distance from the prior:

    L     = L_PPO + prior / 2 E sum(mu^2 + sigma^2 - 1 - 2 ln sigma)

Then ``g`` is refitted to the recently executed actions ``a``, from the *fixed* prior and not from the noise that led to
them, and the encoder is reset to N(0, I):

    L_g   = E |v(a + t (eps - a), t, o) - (eps - a)|^2,    eps ~ N(0, I), t ~ U(0, 1)

So the next stage starts from the result of this one, and the noise stays near the prior.

Deviations: the penalty is the exact KL(N(mu, sigma^2) || N(0, I)) (the public code's mean(mu^2) + mean(sigma^2) is
minimal at sigma = 0); the refit uses the decisions of the stage's last iterations instead of new ones; the initial
decoder is an imitation policy and not the identity; clip range and gradient norm are the same in every stage; of a
decision that its episode's end cut short, ``L_g`` is the mean over the actions that were executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vla_rl.algorithms.decisions import flatten, micro_batches, select_each
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Reducer, Rollout
from vla_rl.contract.config import Checked, above_zero, at_least
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Likelihood, LikelihoodPolicy, public
from vla_rl.policies.flow import flow_matching_errors
from vla_rl.policies.latent_noise import GaussianLatent, is_padded
from vla_rl.policies.noise import normal, uniform

_RefitData: TypeAlias = tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor]  # features to time


@dataclass(frozen=True)
class RefitConfig(Checked):
    """The fit of the decoder; minibatches are as large as PPO's."""

    epochs: int = 20
    lr: float = above_zero(3e-4)


@dataclass(frozen=True)
class GoRLConfig(PPOConfig):
    """PPO's fields are those of the encoder.  After the last stage, PPO continues without a refit."""

    lr: float = 3e-4
    prior: float = at_least(1e-3, 0)  # weight of the KL between encoder and prior
    stages: int = 4
    iterations: int = 20  # PPO iterations per stage
    window: int = 20  # last iterations of a stage, whose actions the refit uses
    refit: RefitConfig = field(default_factory=RefitConfig)


@dataclass(frozen=True)
class _Window:
    """One rollout's data for a refit: {name: [T,E,...]}, normalised chunks [T,E,N], what was executed bool [T,E,H]."""

    features: dict[str, Tensor]
    chunks: Tensor
    executed: Tensor


class GoRL(PPO, config=GoRLConfig):
    """A ``Learner`` for a ``GaussianLatent``; its ``parameters`` are those of encoder and decoder.

    So a loop saves matching pairs as the best weights.  PPO's optimizer holds the encoder's parameters only.
    """

    config: GoRLConfig
    policy: GaussianLatent
    counters = (*PPO.counters, "stage", "stage_iteration")

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        config: GoRLConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        """Raises UserError for a policy without a decoder and for empty stages."""
        if not isinstance(policy, GaussianLatent):
            raise UserError(
                f"{type(self).__name__} needs a Gaussian policy over the noise of a flow (GaussianLatent) but "
                f"{type(policy).__name__} is not, so there is no decoder to refit; choose PPO, or wrap the flow."
            )
        if is_padded(policy.base):
            raise UserError(
                f"{type(policy.base).__name__} generates longer chunks than are executed, so its flow cannot be "
                "refitted to executed actions; choose PPO over its noise, or DSRL."
            )
        if min(config.stages, config.iterations, config.window, config.refit.epochs) < 1:
            raise UserError(
                f"{config.stages} stages of {config.iterations} iterations, refitted to {config.window} of them for "
                f"{config.refit.epochs} epochs, leave nothing to learn; give at least 1 of each."
            )
        super().__init__(policy, parameters, critic, config, generator, reducer)
        self.decoder = policy.base.trainable()
        self.parameters |= {f"decoder.{name}": parameter for name, parameter in self.decoder.items()}
        self.stage, self.stage_iteration = 0, 0
        self.window: list[_Window] = []

    def update(self, rollout: Rollout) -> dict[str, float]:
        """One iteration of PPO, and the refit at the end of a stage."""
        metrics = super().update(rollout)
        if metrics["rollout/decisions"] and self.stage + 1 < self.config.stages:
            self.window = [*self.window, self._refit_data(rollout)][-self.config.window :]
            self.stage_iteration += 1
            if self.stage_iteration == self.config.iterations:
                metrics["policy/refit_loss"] = self.refit()
                self._next_stage()
        return {**metrics, "policy/refits": float(self.stage)}

    def _max_age(self) -> int:
        """Decisions of earlier stages are dropped: their noise went through another decoder."""
        return min(self.config.max_age, self.stage_iteration) if self.stage else self.config.max_age

    def policy_loss(self, minibatch: Any, new: Likelihood) -> tuple[Tensor, Tensor]:
        """PPO's loss plus the penalty on the distance from the prior."""
        loss, clipped = super().policy_loss(minibatch, new)
        return loss + self.config.prior * prior_kl(new.params).mean(), clipped

    def refit(self) -> float:
        """Fit the decoder to the actions of :attr:`window`; returns the mean loss of the last epoch."""
        features, chunks, executed = self._data()
        optimizer = torch.optim.Adam(self.decoder.values(), lr=self.config.refit.lr)
        total, first = self._span(len(chunks))
        local, epoch_loss = slice(first, first + len(chunks)), 0.0
        for _ in range(self.config.refit.epochs):
            # Every process draws for the decisions of all, so that their generators stay equal.
            noise = normal((total, chunks.shape[1]), self.generator, like=chunks)[local]
            time = uniform((total,), self.generator, like=chunks)[local]
            losses = []
            for index, share in self._minibatches(len(chunks)):
                data = features, chunks, executed, noise, time
                _, loss = self._step(optimizer, self._refit_losses(data, index, share), {"decoder": self.decoder})
                losses.append(self._sum(loss))
            epoch_loss = sum(losses) / len(losses)
        optimizer.zero_grad(set_to_none=True)
        return epoch_loss

    def _refit_losses(self, data: _RefitData, index: Tensor, share: float) -> Iterator[Tensor]:
        features, chunks, executed, noise, time = data
        for micro, part in micro_batches(len(index), self.micro_batch):
            chosen = index if micro is None else index[micro]
            velocity = self.policy.base.field(select_each(features, chosen))
            errors = flow_matching_errors(velocity, chunks[chosen], noise[chosen], time[chosen])
            losses = errors.unflatten(-1, (executed.shape[1], -1)).mean(-1) * executed[chosen]
            yield share * part * (losses.sum(-1) / executed[chosen].sum(-1)).mean()

    def _refit_data(self, rollout: Rollout) -> _Window:
        features = {name: item[:-1] for name, item in public(dict(rollout.features)).items()}
        chunks = self.policy.normalized(rollout.executed.flatten(0, 1)).clamp(-1.0, 1.0)
        return _Window(features, chunks.unflatten(0, rollout.terminated.shape), rollout.valid)

    def _data(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Features {name: [B,...]}, chunks [B,N] and their mask [B,H], one environment after the other."""
        executed = torch.cat([part.executed for part in self.window])
        used, names = executed.any(-1), self.window[0].features
        features = {name: flatten(torch.cat([part.features[name] for part in self.window]), used) for name in names}
        return features, flatten(torch.cat([part.chunks for part in self.window]), used), flatten(executed, used)

    def _next_stage(self) -> None:
        """Reset the encoder and its optimizer; the critic keeps the values of the unchanged behaviour."""
        self.policy.restart()
        for parameter in self.learnt.values():
            self.optimizer.state.pop(parameter, None)
        self.lr = self.config.lr
        self.stage, self.stage_iteration, self.window = self.stage + 1, 0, []

    def state_dict(self) -> dict[str, Any]:
        window = [vars(part) for part in self.window]
        return {**super().state_dict(), "window": window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.window = [_Window(**part) for part in state["window"]]


def prior_kl(params: Mapping[str, Tensor]) -> Tensor:
    """``KL(N(mean, std^2) || N(0, I))`` [B] (nats), summed over all but the first axis."""
    mean, std = params["mean"], params["std"]
    return 0.5 * (mean.square() + std.square() - 1.0 - 2.0 * std.log()).flatten(1).sum(1)
