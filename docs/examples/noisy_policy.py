"""A policy: a linear map of the state with Gaussian noise.

It is one file, ``vla_rl/policies/noisy_policy.py``, and needs no line elsewhere: every algorithm that asks for a
``LikelihoodPolicy`` takes it as it is, as ``reinforce.py`` beside it shows.  ``check_policy`` says whether it keeps the
contract.  For checkpoints add ``save_pretrained`` and ``from_pretrained`` as in ``vla_rl/policies/gaussian.py``; their
``config.json`` names the class, which is how ``vla-rl eval`` and ``vla-rl inspect`` find it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

from vla_rl.contract.env import Array, Observation
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.normalization import Affine, action_limits


class LinearGaussian(nn.Module):
    """``sample ~ N(W s + b, diag(std^2))``: one normalised action per decision; mode "eval" takes the mean."""

    def __init__(self, spec: EnvSpec, std: float = 0.5) -> None:
        super().__init__()
        self.spec, self.version = spec, 0
        self.state_scale, self.action_scale = Affine.from_bounds(spec.state), Affine.from_bounds(spec.action)
        self.low, self.high = action_limits(spec)
        self.linear = nn.Linear(spec.state.shape[0], spec.action_dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.log_std = nn.Parameter(torch.full((spec.action_dim,), std).log())

    def encode(self, obs: Observation) -> Features:
        """What rollouts keep of an observation: everything that ``distribution`` or a critic reads."""
        return {"state": self.state_scale.normalize(torch.as_tensor(obs.state))}

    def initial_state(self, rows: int) -> State:
        return {}

    def reset_state(self, state: State, rows: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: torch.Generator) -> tuple[ActionOut, State]:
        policy = self.distribution(features)
        sample, logprob = policy.mean, torch.zeros(len(policy.mean))
        if mode == "sample":
            sample = policy.mean + policy.stddev * torch.randn(policy.mean.shape, generator=generator)
            logprob = policy.log_prob(sample)  # of the raw sample: what is clipped below has no density
        action = torch.clamp(self.action_scale.unnormalize(sample), self.low, self.high)
        return ActionOut(action[:, None], sample[:, None], logprob, {}, self.version), state

    def distribution(self, features: Features) -> Independent:
        """Over normalised actions [B,D]."""
        mean = self.linear(features["state"])
        return Independent(Normal(mean, self.log_std.exp().expand_as(mean)), 1)

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        policy = self.distribution(features)
        return Likelihood(policy.log_prob(sample[:, 0]), policy.entropy(), {"mean": policy.mean, "std": policy.stddev})

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        one, two = (Independent(Normal(given["mean"], given["std"]), 1) for given in (old, new))
        return kl_divergence(one, two)

    def trainable(self) -> dict[str, nn.Parameter]:
        """What an algorithm may change."""
        return dict(self.named_parameters())
