"""What all flow-matching policies share: acting by a sampler, and the density of its chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vla_rl.contract.env import Array, EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import ActionOut, Features, Likelihood, Mode, State
from vla_rl.policies.flow import Chain, FlowSampler, VelocityField, gaussian_kl
from vla_rl.policies.history import ObservationPolicy
from vla_rl.policies.noise import Generators, normal
from vla_rl.policies.normalization import Affine, Relative, check_relative, made_absolute, origin_of

Compute = Callable[[VelocityField, Features], Features]


class FlowPolicy(ObservationPolicy):
    """A policy whose subclasses have a velocity field; it implements ``LikelihoodPolicy``.

    Its density is that of ``config.sampler``'s chain (Flow-SDE, Flow-Noise, ...; see ``policies/flow.py``).  The first
    ``H`` rows and ``D`` columns of the chain's end are ``sample``; un-normalised and clipped they are executed, where
    features have ``ORIGIN`` relative to that.  Mode "eval" is always the deterministic ODE, from random noise of the
    sampler's ``temperature``.
    """

    config: Any  # a frozen dataclass with horizon and sampler, and ``relative`` where actions may be

    def __init__(self, spec: EnvSpec, action_scale: Affine, config: Any) -> None:
        super().__init__()
        self.spec, self.action_scale, self.config = spec, action_scale, config
        self.version, self.sampler, self.final_noise = 0, config.sampler, 1.0
        self.relative: Relative = getattr(config, "relative", ())
        check_relative(self.relative, spec)
        self.set_limits(spec)

    def field(self, features: Features) -> VelocityField:
        """The velocity field given features, differentiable in what is trained."""
        raise NotImplementedError

    def encode(self, obs: Observation) -> Features:
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        raise NotImplementedError

    def acting_field(self, features: Features) -> VelocityField:
        """The same without gradient: it may be computed in another way."""
        return self.field(features)

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @property
    def latent_shape(self) -> tuple[int, int]:
        """Rows and columns of the noise that a chain starts from: ``(H, D)`` unless the model pads them."""
        return self.horizon, self.spec.action_dim

    # -- acting -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, features: Features, state: State, mode: Mode, generator: Generators) -> tuple[ActionOut, State]:
        noise = self.initial_noise(len(features["state"]), generator)
        if mode == "eval":
            return self.integrated(features, noise), state
        steps, xi = self.sampler.draw(noise, generator)
        drawn = {"noise": noise, "noisy_steps": steps, "xi": xi, **origin_of(features)}
        found = self.decided(("sampled", self.sampler), self._sampled, features, drawn)
        aux = {"points": found["points"], "noisy_steps": steps}
        return ActionOut(found["action"], found["sample"], found["logprob"], aux, self.version), state

    def _sampled(self, field: VelocityField, drawn: Features) -> Features:
        chain, density = self.sampler.chain(field, drawn["noise"], drawn["noisy_steps"], drawn["xi"])
        return {**self.executed(chain.sample, drawn), "points": chain.points, "logprob": density.logprob}

    def decided(self, key: Hashable, compute: Compute, features: Features, drawn: Features) -> Features:
        """``compute(field, drawn)`` for the acting field of ``features``, without gradient.

        ``compute`` draws nothing and does not look at values.  A policy may record what it does and replay that at the
        same ``key``, which therefore says all that it depends on beside features and ``drawn``.
        """
        return compute(self.acting_field(features), drawn)

    def initial_noise(self, count: int, generator: Generators) -> Tensor:
        """The noise [count,N] that chains start from."""
        return normal((count, math.prod(self.latent_shape)), generator, like=self.action_low)

    def integrated(self, features: Features, noise: Tensor) -> ActionOut:
        """The decisions that the ODE makes of ``noise`` N(0, 1) [E,N], as in mode "eval"."""
        drawn = {"noise": noise, **origin_of(features)}
        found = self.decided(("ended", self.sampler), self.ended, features, drawn)
        return ActionOut(found["action"], found["sample"], noise.new_zeros(len(noise)), {}, self.version)

    def ended(self, field: VelocityField, drawn: Features) -> Features:
        """``sample`` and ``action`` at the end of the ODE of ``field`` from ``drawn["noise"]``."""
        return self.executed(self.sampler.deterministic(field, self.sampler.temperature * drawn["noise"]), drawn)

    def executed(self, end: Tensor, features: Features) -> Features:
        """What is executed of the ends of chains [B,N]: ``sample`` [B,H,D], and ``action``, un-normalised.

        Of ``features`` only ``ORIGIN`` is read, where actions are relative.
        """
        sample = self._executed(end)
        return {"sample": sample, "action": self._bounded(sample, features)}

    def _executed(self, end: Tensor) -> Tensor:
        """The executed part [B,H,D] of the end of chains [B,N]."""
        return end.unflatten(-1, self.latent_shape)[:, : self.horizon, : self.spec.action_dim]

    def _bounded(self, sample: Tensor, features: Features) -> Tensor:
        """The actions [B,H,D] of ``sample``."""
        absolute = made_absolute(features, self.action_scale.unnormalize(sample))
        return absolute.clamp(self.action_low, self.action_high)

    # -- learning ---------------------------------------------------------------------------------------------------

    def log_prob(self, features: Features, sample: Tensor, aux: Mapping[str, Tensor]) -> Likelihood:
        """Joint density of recorded chains, summed over noisy steps and dimensions; ``sample`` is their last point."""
        density = self.sampler.log_prob(self.field(features), Chain(aux["points"], aux["noisy_steps"]))
        return Likelihood(density.logprob, density.entropy, {"mean": density.mean, "std": density.std})

    kl = staticmethod(gaussian_kl)

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
