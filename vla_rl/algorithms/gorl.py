"""GoRL: turns of PPO on the latent noise and of flow matching of the decoder (Zhang et al. 2025, arXiv 2512.02581).

A stage of PPO trains the encoder ``w ~ N(mu(o), sigma^2)`` through the decoder ``g``, which is frozen meanwhile, so
that ratios are exact, and holds it near the prior:

    L     = L_PPO + prior / 2 E sum(mu^2 + sigma^2 - 1 - 2 ln sigma)

Then ``g`` is refitted to the actions ``a`` that were executed of late, from the *fixed* prior and not from the noise
that led to them, and the encoder starts again at N(0, I):

    L_g   = E |v(a + t (eps - a), t, o) - (eps - a)|^2,    eps ~ N(0, I), t ~ U(0, 1)

So what a stage has learnt becomes what the next one begins with, and noise is never pushed far from the prior.

Deviations: the penalty is the exact KL(N(mu, sigma^2) || N(0, I)) (the public code's mean(mu^2) + mean(sigma^2) is
least at sigma = 0); the decisions of the stage's last iterations serve for the refit instead of new ones; the decoder
begins as an imitation policy and not as the identity; clip range and gradient norm are the same in every stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.policy_gradient import by_row, pick
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import Reducer, Rollout
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import Likelihood, LikelihoodPolicy, public
from vla_rl.policies.flow import flow_matching_loss
from vla_rl.policies.latent_noise import GaussianLatent


@dataclass(frozen=True)
class RefitConfig:
    """How the decoder is fitted; minibatches are as large as PPO's."""

    epochs: int = 20
    lr: float = 3e-4


@dataclass(frozen=True)
class GoRLConfig(PPOConfig):
    """PPO's numbers are those of the encoder.  After the last stage, PPO goes on without another refit."""

    lr: float = 3e-4
    prior: float = 1e-3  # weight of the KL between encoder and prior
    stages: int = 4
    iterations: int = 20  # of PPO in a stage
    window: int = 20  # last iterations of a stage, to whose actions the decoder is refitted
    refit: RefitConfig = field(default_factory=RefitConfig)

    def build(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        generator: torch.Generator,
        reducer: Reducer,
    ) -> GoRL:
        """The learner with these numbers."""
        return GoRL(policy, parameters, critic, self, generator, reducer)


@dataclass(frozen=True)
class _Window:
    """What one rollout contributes to a refit: {name: [T,E,...]}, normalised chunks [T,E,N], which of them [T,E]."""

    features: dict[str, Tensor]
    chunks: Tensor
    used: Tensor


class GoRL(PPO):
    """A ``Learner`` for a ``GaussianLatent``; its ``parameters`` are those of encoder and decoder.

    So what a loop keeps as the best is a pair that fits.  PPO's optimiser holds the encoder's only.
    """

    config: GoRLConfig
    policy: GaussianLatent

    def __init__(
        self,
        policy: LikelihoodPolicy,
        parameters: Mapping[str, nn.Parameter],
        critic: nn.Module,
        config: GoRLConfig,
        generator: torch.Generator,
        reducer: Reducer | None = None,
    ) -> None:
        """Raises UserError for a policy without a decoder, and for stages in which nothing would be learnt."""
        if not isinstance(policy, GaussianLatent):
            raise UserError(
                f"{type(self).__name__} needs a Gaussian policy over the noise of a flow (GaussianLatent) but "
                f"{type(policy).__name__} is none, so there is no decoder to refit; choose PPO, or wrap the flow."
            )
        if min(config.stages, config.iterations, config.window, config.refit.epochs) < 1:
            raise UserError(
                f"{config.stages} stages of {config.iterations} iterations, refitted to {config.window} of them for "
                f"{config.refit.epochs} epochs, leave nothing to learn; give at least 1 of each."
            )
        super().__init__(policy, parameters, critic, config, generator, reducer)
        self.decoder = policy.base.trainable()
        self.parameters |= {f"decoder.{name}": parameter for name, parameter in self.decoder.items()}
        self.stage, self.played = 0, 0
        self.window: list[_Window] = []

    def update(self, rollout: Rollout) -> dict[str, float]:
        """One iteration of PPO, and at the end of a stage the refit."""
        metrics = super().update(rollout)
        if metrics["decisions"] and self.stage + 1 < self.config.stages:
            self.window = [*self.window, self._kept(rollout)][-self.config.window :]
            self.played += 1
            if self.played == self.config.iterations:
                metrics["refit_loss"] = self.refit()
                self._begin_stage()
        return {**metrics, "refits": float(self.stage)}

    def policy_loss(self, row: Any, new: Likelihood) -> tuple[Tensor, Tensor]:
        """PPO's, and what it costs to be far from the prior."""
        loss, clipped = super().policy_loss(row, new)
        return loss + self.config.prior * prior_kl(new.params).mean(), clipped

    def refit(self) -> float:
        """Fit the decoder to the actions of :attr:`window`; returns the mean loss of the last epoch."""
        features, chunks = self._data()
        optimizer = torch.optim.Adam(self.decoder.values(), lr=self.config.refit.lr)
        total, first = self._span(len(chunks))
        mine, loss_of_epoch = slice(first, first + len(chunks)), 0.0
        for _ in range(self.config.refit.epochs):
            # Drawn for the decisions of all processes in each of them, so that their generators stay equal.
            noise = torch.randn(total, chunks.shape[1], generator=self.generator, dtype=chunks.dtype)[mine]
            time = torch.rand(total, generator=self.generator, dtype=chunks.dtype)[mine]
            losses = []
            for index, share in self._minibatches(len(chunks)):
                loss = torch.zeros(())
                if share:
                    velocity = self.policy.base.field(pick(features, index))
                    matching = flow_matching_loss(velocity, chunks[index], noise[index], time[index])
                    loss = share * matching.mean()
                self._step(optimizer, loss, self.decoder, "decoder")
                losses.append(self._sum(float(loss.detach())))
            loss_of_epoch = sum(losses) / len(losses)
        optimizer.zero_grad(set_to_none=True)
        return loss_of_epoch

    def _kept(self, rollout: Rollout) -> _Window:
        features = {name: item[:-1] for name, item in public(dict(rollout.features)).items()}
        chunks = self.policy.normalized(rollout.executed.flatten(0, 1)).clamp(-1.0, 1.0)
        return _Window(features, chunks.unflatten(0, rollout.terminated.shape), rollout.valid.any(-1))

    def _data(self) -> tuple[dict[str, Tensor], Tensor]:
        """What was seen {name: [B,...]} and done [B,N] in the window, one row of environments after the other."""
        used = torch.cat([part.used for part in self.window])
        names = self.window[0].features
        features = {name: by_row(torch.cat([part.features[name] for part in self.window]), used) for name in names}
        return features, by_row(torch.cat([part.chunks for part in self.window]), used)

    def _begin_stage(self) -> None:
        """The encoder begins anew, and so does its optimiser; the critic's values are still those of the behaviour."""
        self.policy.restart()
        self.optimizer.state.clear()
        self.lr = self.config.lr
        self.stage, self.played, self.window = self.stage + 1, 0, []

    def state_dict(self) -> dict[str, Any]:
        window = [{"features": part.features, "chunks": part.chunks, "used": part.used} for part in self.window]
        return {**super().state_dict(), "stage": self.stage, "played": self.played, "window": window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stage, self.played = state["stage"], state["played"]
        self.window = [_Window(**part) for part in state["window"]]


def prior_kl(params: Mapping[str, Tensor]) -> Tensor:
    """``KL(N(mean, std^2) || N(0, I))`` [B] (nats), summed over all but the first axis."""
    mean, std = params["mean"], params["std"]
    return 0.5 * (mean.square() + std.square() - 1.0 - 2.0 * std.log()).flatten(1).sum(1)
