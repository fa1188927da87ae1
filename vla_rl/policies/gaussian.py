"""A state-based diagonal-Gaussian policy over action chunks: the plain policy of robotics PPO, and of the toys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import from_json, to_json
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.flow import gaussian_kl
from vla_rl.policies.image_encoder import ImageEncoder
from vla_rl.policies.noise import Generators, normal
from vla_rl.policies.normalization import Affine, action_limits, check_same_env
from vla_rl.policies.observations import encode_inputs, hidden_layers
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.statistics import RunningStatistics, build_standardizer
from vla_rl.pretrained import load_weights, save_folder


@dataclass(frozen=True)
class GaussianConfig:
    """Sizes of the network, how much it explores at first, and the cameras that it reads."""

    horizon: int = 1  # H: actions in a chunk
    width: int = 64
    depth: int = 2
    std: float = 0.5  # initial, of normalised actions
    cameras: tuple[str, ...] = ()


class GaussianPolicy(nn.Module):
    """``N(mean(observation), diag(std^2))`` over the normalised chunk, ``std`` learned and the same everywhere.

    The network reads proprioception, standardised by ``proprioception``: the bounds of ``spec.state`` by default, or
    ``RunningStatistics(S)``, the statistics of all training data so far, for states without bounds.  The images of
    ``config.cameras`` go through an ``ImageEncoder`` that is trained with the rest.  The sample is never clipped, so
    its density is exact; the action is the sample in physical units, clipped to the bounds.
    Mode "eval" takes the mean.  It implements ``LikelihoodPolicy`` and ``Observer``.
    """

    action_low: Tensor
    action_high: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        proprioception: Affine | RunningStatistics | None = None,
        config: GaussianConfig | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.config = spec, config or GaussianConfig()
        self.proprioception = proprioception or Affine.from_bounds(spec.state)
        self.standardize = build_standardizer(self.proprioception)
        self.action_scale, self.version = Affine.from_bounds(spec.action), 0
        self.vision = ImageEncoder.of(spec, self.config.cameras)
        inputs, width, depth = spec.state.shape[0] + self.vision.size, self.config.width, self.config.depth
        layers = hidden_layers(inputs, width, depth)
        last = nn.Linear(width if depth else inputs, self.config.horizon * spec.action_dim)
        nn.init.orthogonal_(last.weight, 0.01)  # the initial mean is near the middle of the bounds in every state
        nn.init.zeros_(last.bias)
        self.network = nn.Sequential(*layers, last)
        self.log_std = nn.Parameter(torch.full_like(last.bias, math.log(self.config.std)))
        low, high = action_limits(spec)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        """``{"state": [E,S] physical, "time": [E,1], "image/NAME": uint8 [E,h,w,c]}``; see ``encode_inputs``."""
        return encode_inputs(obs, self.spec, self.config.cameras, self.action_low.device)

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        """Mode "eval" draws nothing, so it needs no generator."""
        sample = mean = self.mean(features)
        logprob = mean.new_zeros(len(sample), dtype=torch.float64)
        if mode == "sample":
            sample = mean + self.log_std.exp() * normal(mean.shape, generator, like=mean)
            logprob = self._log_density(mean, sample)
        sample = sample.unflatten(-1, (self.config.horizon, self.spec.action_dim))
        action = self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)
        return ActionOut(action, sample, logprob, {}, self.version), state

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Density of the raw samples, summed over the chunk; the sum is float64 so that ratios keep their precision."""
        mean = self.mean(features)
        logprob = self._log_density(mean, sample.reshape(mean.shape))
        entropy = (self.log_std + 0.5 * math.log(2.0 * math.pi * math.e)).sum(dtype=torch.float64)
        params = {"mean": mean[:, None], "std": self.log_std.exp().expand_as(mean)[:, None]}
        return Likelihood(logprob, entropy.expand(len(mean)), params)

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        """Exact KL(old || new) [B]."""
        return gaussian_kl(old["mean"], old["std"], new["mean"], new["std"])

    def mean(self, features: Features) -> Tensor:
        """The mean of the distribution, [B,H*D] normalised."""
        state = self.standardize(features["state"].to(self.log_std))
        mean: Tensor = self.network(torch.cat([state, self.vision(features)], -1))
        return mean

    def observe(self, features: Features, reducer: Reducer) -> None:
        """Merge the states [B,S] of the last update into the running statistics, if there are any."""
        self.standardize.observe(features["state"], reducer)

    def _log_density(self, mean: Tensor, sample: Tensor) -> Tensor:
        terms = -0.5 * ((sample - mean) / self.log_std.exp()).square() - self.log_std
        return (terms - 0.5 * math.log(2.0 * math.pi)).sum(-1, dtype=torch.float64)

    def trainable(self) -> dict[str, nn.Parameter]:
        """All weights, and the running statistics (without gradient)."""
        return dict(self.named_parameters())

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        parts = {"config": to_json(self.config), "proprioception": to_json(self.proprioception)}
        save_folder(Path(folder), {"policy": name, "spec": self.spec.to_json(), **parts}, self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> GaussianPolicy:
        """Load a checkpoint; with ``spec``, first check that the policy was trained for such an environment."""
        saved = read_config(Path(folder))
        trained = EnvSpec.from_json(saved["spec"])
        check_same_env(trained, spec or trained)
        policy = cls(spec or trained, from_json(saved["proprioception"]), from_json(saved["config"]))
        load_weights(policy, Path(folder))
        return policy.eval()
