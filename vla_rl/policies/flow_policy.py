"""What all flow-matching policies share: acting by a sampler, and the density of its chains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vla_rl.contract.env import Array, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.flow import Chain, FlowSampler, VelocityField, gaussian_kl
from vla_rl.policies.noise import Generators, normal
from vla_rl.policies.normalization import Affine, action_limits


class FlowPolicy(nn.Module):
    """A policy whose subclasses have a velocity field; it implements ``LikelihoodPolicy``.

    Its density is that of ``config.sampler``'s chain (Flow-SDE, Flow-Noise, ...; see ``policies/flow.py``).  The first
    ``H`` rows and ``D`` columns of the chain's end are ``sample``; un-normalised and clipped they are executed.  Mode
    "eval" is always the deterministic ODE, from random noise of the sampler's ``temperature``.
    """

    config: Any  # a frozen dataclass with horizon and sampler
    action_low: Tensor
    action_high: Tensor

    def __init__(self, spec: EnvSpec, action_scale: Affine, config: Any) -> None:
        super().__init__()
        self.spec, self.action_scale, self.config = spec, action_scale, config
        self.version, self.sampler, self.final_noise = 0, config.sampler, 1.0
        low, high = action_limits(spec)
        self.register_buffer("action_low", low, persistent=False)
        self.register_buffer("action_high", high, persistent=False)

    def field(self, features: Features) -> VelocityField:
        """The velocity field given features, differentiable in what is trained."""
        raise NotImplementedError

    def encode(self, obs: Observation) -> Features:
        """See ``Policy``."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that names the class, see ``vla_rl/pretrained.py``."""
        raise NotImplementedError

    def acting_field(self, features: Features) -> VelocityField:
        """The same without gradient: it may be computed in another way."""
        return self.field(features)

    @property
    def horizon(self) -> int:
        """``H``: actions in a chunk."""
        horizon: int = self.config.horizon
        return horizon

    @property
    def latent_shape(self) -> tuple[int, int]:
        """Rows and columns of the noise that a chain starts from: ``(H, D)`` unless the model pads them."""
        return self.horizon, self.spec.action_dim

    # -- acting -----------------------------------------------------------------------------------------------------

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        field, noise = self.acting_field(features), self.initial_noise(len(features["state"]), generator)
        if mode == "eval":
            return self.integrated(field, noise), state
        chain, density = self.sampler.sample(field, noise, generator)
        aux = {"points": chain.points, "noisy_steps": chain.noisy_steps}
        return self._action_out(chain.sample, density.logprob, aux), state

    def initial_noise(self, count: int, generator: Generators) -> Tensor:
        """The noise [count,N] that chains start from."""
        return normal((count, math.prod(self.latent_shape)), generator, like=self.action_low)

    def integrated(self, field: VelocityField, noise: Tensor) -> ActionOut:
        """The decisions that the ODE of ``field`` makes of ``noise`` N(0, 1) [E,N], as in mode "eval"."""
        end = self.sampler.deterministic(field, self.sampler.temperature * noise)
        return self._action_out(end, end.new_zeros(len(noise)), {})

    def _action_out(self, end: Tensor, logprob: Tensor, aux: Mapping[str, Tensor]) -> ActionOut:
        sample = self._executed(end)
        return ActionOut(self._bounded(sample), sample, logprob, aux, self.version)

    def _executed(self, end: Tensor) -> Tensor:
        """The executed part [B,H,D] of the end of chains [B,N]."""
        return end.unflatten(-1, self.latent_shape)[:, : self.horizon, : self.spec.action_dim]

    def _bounded(self, sample: Tensor) -> Tensor:
        """The actions [B,H,D] of ``sample``."""
        return self.action_scale.unnormalize(sample).clamp(self.action_low, self.action_high)

    # -- learning ---------------------------------------------------------------------------------------------------

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Joint density of recorded chains, summed over noisy steps and dimensions; ``sample`` is their last point."""
        density = self.sampler.log_prob(self.field(features), Chain(aux["points"], aux["noisy_steps"]))
        return Likelihood(density.logprob, density.entropy, {"mean": density.mean, "std": density.std})

    def kl(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Tensor:
        """Exact KL of the chains, an upper bound of that of the actions (data processing)."""
        return gaussian_kl(old["mean"], old["std"], new["mean"], new["std"])

    def with_sampler(self, sampler: FlowSampler, final_noise: float = 1.0) -> Self:
        """Replace the sampler; returns ``self``.  Its noise falls linearly to ``final_noise`` times itself in a run."""
        self.config, self.final_noise = replace(self.config, sampler=sampler), final_noise
        self.set_progress(0.0)
        return self

    def with_temperature(self, temperature: float) -> Self:
        """Deploy at another ``temperature`` (see ``FlowSampler``); returns ``self``."""
        self.config = replace(self.config, sampler=replace(self.config.sampler, temperature=temperature))
        self.sampler = replace(self.sampler, temperature=temperature)
        return self

    def set_progress(self, progress: float) -> None:
        """Scale the noise of ``config.sampler`` for a run of which the share ``progress`` is done."""
        self.sampler = self.config.sampler.scaled(1.0 + (self.final_noise - 1.0) * progress)

    def _tensor(self, array: Array) -> Tensor:
        return torch.as_tensor(array, device=self.action_low.device)


def at_temperature(policy: object, temperature: float | None, option: str) -> None:
    """Deploy ``policy`` at ``temperature`` (None: as it is); UserError, naming ``option``, for one that has none."""
    if temperature is None:
        return
    if not isinstance(policy, FlowPolicy):
        raise UserError(
            f"{type(policy).__name__} starts from no noise, so {option} would change nothing; leave it out (none), or "
            "name the checkpoint of a flow policy."
        )
    policy.with_temperature(temperature)
