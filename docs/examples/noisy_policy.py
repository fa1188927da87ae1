"""A policy: a linear map of the state with Gaussian noise.

It is one file and inherits from no class of ours: every algorithm that asks for a ``LikelihoodPolicy`` takes it.  In
the folder that holds it, ``--policy noisy_policy:LinearGaussian`` starts a run from a new one.  Its checkpoints name
the class, which is how ``vla-rl eval``, ``inspect`` and ``--policy FOLDER`` find it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

from vla_rl.contract.env import Array, EnvSpec, Observation
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.policies.noise import Generators, normal
from vla_rl.policies.normalization import Affine, action_limits, check_same_env
from vla_rl.policies.pretrained import read_config
from vla_rl.pretrained import load_weights, save_folder


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
        """What rollouts keep of an observation: what ``distribution`` reads, and the time [E,1], for critics."""
        state = self.state_scale.normalize(torch.as_tensor(obs.state))
        return {"state": state, "time": torch.as_tensor(obs.time)[:, None].to(state) / self.spec.time_limit}

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        policy = self.distribution(features)
        sample, logprob = policy.mean, torch.zeros(len(policy.mean))
        if mode == "sample":
            sample = policy.mean + policy.stddev * normal(policy.mean.shape, generator, like=policy.mean)
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

    @property
    def feature_sizes(self) -> dict[str, int]:
        """The features that a critic, or a head on top of this policy, reads."""
        return {"state": self.spec.state.shape[0]}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        save_folder(Path(folder), {"policy": name, "spec": self.spec.to_json()}, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> LinearGaussian:
        """Load a checkpoint for an environment with ``spec``, or for the one that it was trained in."""
        trained = EnvSpec.from_json(read_config(Path(folder))["spec"])
        check_same_env(trained, spec or trained)
        policy = cls(spec or trained)
        load_weights(policy, Path(folder))
        return policy
