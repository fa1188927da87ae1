"""A state-based diagonal-Gaussian policy over action chunks: the plain policy of robotics PPO, and of the toys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vla_rl.contract.limits import check_positive, check_sizes
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.feed_forward import FeedForwardPolicy
from vla_rl.policies.flow import gaussian_kl
from vla_rl.policies.likelihood_parts import LogprobPer, check_logprob_per
from vla_rl.policies.noise import Generators, normal
from vla_rl.policies.normalization import Affine, action_limits
from vla_rl.policies.observations import Activation, check_activation
from vla_rl.policies.statistics import RunningStatistics


@dataclass(frozen=True)
class GaussianConfig:
    """Sizes of the network, how much it explores at first, and the cameras that it reads."""

    horizon: int = 1  # H: actions in a chunk
    width: int = 64
    depth: int = 2
    std: float = 0.5  # initial, of normalised actions
    cameras: tuple[str, ...] = ()
    logprob_per: LogprobPer = "chunk"  # or "action", "token" (an entry): what has a ratio of its own in PPO and GRPO
    activation: Activation = "tanh"  # or "elu", of the hidden layers

    def __post_init__(self) -> None:
        check_sizes(self, "horizon", "width", "depth")
        check_positive(self, "std")
        check_logprob_per(self)
        check_activation(self)


class GaussianPolicy(FeedForwardPolicy):
    """``N(mean(observation), diag(std^2))`` over the normalised chunk, ``std`` learned and the same everywhere.

    See ``FeedForwardPolicy`` for what the mean depends on.  The sample is never clipped, so its density is exact; the
    action is the sample in physical units, clipped to the bounds.  Mode "eval" takes the mean.  It implements
    ``LikelihoodPolicy`` and ``Observer``.
    """

    config: GaussianConfig
    action_low: Tensor
    action_high: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        proprioception: Affine | RunningStatistics | None = None,
        config: GaussianConfig | None = None,
    ) -> None:
        super().__init__(spec, proprioception, config or GaussianConfig())
        self.action_scale = Affine.from_bounds(spec.action)
        nn.init.orthogonal_(self.last.weight, 0.01)  # the initial mean is near the middle of the bounds in every state
        nn.init.zeros_(self.last.bias)
        self.log_std = nn.Parameter(torch.full_like(self.last.bias, math.log(self.config.std)))
        low, high = action_limits(spec)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    def _num_outputs(self) -> int:
        return self.entries

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Mode "eval" draws nothing, so it needs no generator."""
        sample = mean = self.mean(features)
        terms = torch.zeros_like(mean)
        if mode == "sample":
            sample = mean + self.log_std.exp() * normal(mean.shape, generator, like=mean)
            terms = self._log_density(mean, sample)
        logprob, sample = self.logprob(terms), self.chunked(sample)
        action = self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)
        return ActionOut(action, sample, logprob, {}, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Density of the raw samples, summed in float64 over the chunk, or over each of its parts."""
        mean = self.mean(features)
        logprob = self.logprob(self._log_density(mean, sample.reshape(mean.shape)))
        entropy = (self.log_std + 0.5 * math.log(2.0 * math.pi * math.e)).sum(dtype=torch.float64)
        params = {"mean": mean[:, None], "std": self.log_std.exp().expand_as(mean)[:, None]}
        return Likelihood(logprob, entropy.expand(len(mean)), params)

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        """Exact KL(old || new) [B]."""
        return gaussian_kl(old["mean"], old["std"], new["mean"], new["std"])

    def mean(self, features: Features) -> Tensor:
        """The mean of the distribution, [B,H*D] normalised."""
        return self.outputs(features)

    def _log_density(self, mean: Tensor, sample: Tensor) -> Tensor:
        """The log-density of every entry of ``sample``, all [B,H*D]."""
        terms = -0.5 * ((sample - mean) / self.log_std.exp()).square() - self.log_std
        return terms - 0.5 * math.log(2.0 * math.pi)
