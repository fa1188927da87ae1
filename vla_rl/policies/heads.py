"""Heads on frozen policies: deterministic, squashed Gaussian (SAC) and Gaussian (PPO) networks; what they read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.batch import Reducer
from vla_rl.contract.config import DEEPEST, WIDEST, Checked, from_json, to_json, within
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import Features, Likelihood, Mode
from vla_rl.policies.history import ObservationPolicy
from vla_rl.policies.noise import Generators, normal
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import Saveable, load_weights, save_folder

_LOG_2PI = math.log(2.0 * math.pi)


@dataclass(frozen=True)
class HeadConfig(Checked):
    """Sizes of the network."""

    width: int = within(256, 1, WIDEST)
    depth: int = within(2, 1, DEEPEST)


class Inputs(nn.Module):
    """Chosen features, flattened, concatenated and standardised: [..., N].

    The statistics are parameters without gradient, so that they are published, saved and restored with the weights.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        self.keys, self.size = tuple(sizes), sum(sizes.values())
        self.mean = nn.Parameter(torch.zeros(self.size), requires_grad=False)
        self.std = nn.Parameter(torch.ones(self.size), requires_grad=False)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        return (self.concatenate(features) - self.mean) / self.std

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Set mean and standard deviation from the data of all processes; call once, before the first update."""
        inputs = self.concatenate(features).flatten(0, -2).double()
        count = reducer.sum(torch.tensor(float(len(inputs)), dtype=torch.float64, device=inputs.device))
        mean = reducer.sum(inputs.sum(0)) / count
        variance = reducer.sum((inputs - mean).square().sum(0)) / (count - 1).clamp_min(1)
        self.mean.copy_(mean)
        self.std.copy_(variance.sqrt().clamp_min(1e-2))

    def concatenate(self, features: Mapping[str, Tensor]) -> Tensor:
        """The inputs before standardising, [..., N]."""
        lead = features[self.keys[0]].dim() - 1
        return torch.cat([features[key].flatten(lead).to(self.mean) for key in self.keys], -1)


class Trunk(nn.Module):
    """Standardised inputs and hidden layers, each followed by LayerNorm: features [B,width]."""

    def __init__(self, sizes: Mapping[str, int], config: HeadConfig) -> None:
        super().__init__()
        self.inputs = Inputs(sizes)
        widths = [self.inputs.size] + [config.width] * config.depth
        self.layers = nn.Sequential(
            *(layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.LayerNorm(pair[1]), nn.SiLU()))
        )

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        return self.layers(self.inputs(features))


class Head(nn.Module):
    """A network with a trunk."""

    trunk: Trunk


class DeterministicHead(Head):
    """``tanh(f(o))`` within [-1, 1]; 0 for every input at initialisation."""

    def __init__(self, sizes: Mapping[str, int], outputs: int, config: HeadConfig) -> None:
        super().__init__()
        self.trunk = Trunk(sizes, config)
        self.last = zero_init(nn.Linear(config.width, outputs))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        return torch.tanh(self.last(self.trunk(features)))


class SquashedHead(Head):
    """``tanh(u)``, ``u ~ N(mean(o), std(o)^2)``: the policy of SAC (Haarnoja et al. 2018, arXiv 1801.01290, app. C)."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        outputs: int,
        config: HeadConfig,
        std: float = 1.0,
        std_bounds: tuple[float, float] = (math.exp(-5.0), math.exp(2.0)),
    ) -> None:
        """``std``: initial standard deviation of ``u``; ``std_bounds``: the range of the learned one."""
        super().__init__()
        bounds = (math.log(std_bounds[0]), math.log(std_bounds[1]))
        self.trunk, self.bounds = Trunk(sizes, config), bounds
        self.last = zero_init(nn.Linear(config.width, 2 * outputs))
        share = (math.log(std) - bounds[0]) / (bounds[1] - bounds[0])
        with torch.no_grad():
            self.last.bias[outputs:] = math.atanh(2.0 * share - 1.0)

    def distribution(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the standard deviation of ``u``, both [B,N]."""
        mean, raw = self.last(self.trunk(features)).chunk(2, -1)
        low, high = self.bounds
        return mean, low + 0.5 * (high - low) * (torch.tanh(raw) + 1.0)

    def forward(self, features: Mapping[str, Tensor], generator: Generators) -> tuple[Tensor, Tensor]:
        """A reparameterised sample [B,N] within [-1, 1] and its log-density [B]."""
        mean, log_std = self.distribution(features)
        xi = normal(mean.shape, generator, like=mean)
        u = mean + log_std.exp() * xi
        density = -0.5 * xi.square() - log_std - 0.5 * _LOG_2PI
        return torch.tanh(u), (density - log_tanh_derivative(u)).sum(-1)

    def log_prob(self, features: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """Log-densities [B,N] of the entries of actions [B,N], which are first clamped 1e-5 inside the bounds."""
        mean, log_std = self.distribution(features)
        u = torch.atanh(action.clamp(-1.0 + 1e-5, 1.0 - 1e-5))
        density = -0.5 * ((u - mean) / log_std.exp()).square() - log_std - 0.5 * _LOG_2PI
        return density - log_tanh_derivative(u)

    def mode(self, features: Mapping[str, Tensor]) -> Tensor:
        """``tanh(mean)`` [B,N]."""
        return torch.tanh(self.distribution(features)[0])


class GaussianHead(Head):
    """``N(f(o), std^2)`` with a learned ``std`` that does not depend on ``o``; ``f`` is 0 initially; never clipped."""

    def __init__(self, sizes: Mapping[str, int], outputs: int, config: HeadConfig, std: float) -> None:
        super().__init__()
        self.trunk = Trunk(sizes, config)
        self.last = zero_init(nn.Linear(config.width, outputs))
        self.log_std = nn.Parameter(torch.full((outputs,), math.log(std)))

    def forward(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, both [B,N]."""
        mean = self.last(self.trunk(features))
        return mean, self.log_std.exp().expand_as(mean)

    def choose(self, features: Mapping[str, Tensor], mode: Mode, generator: Generators) -> tuple[Tensor, Tensor]:
        """Numbers [B,N] and their log-density float64 [B]: in mode "eval" the mean, and 0."""
        mean, std = self(features)
        if mode == "eval":
            return mean, mean.new_zeros(len(mean), dtype=torch.float64)
        chosen = mean + std * normal(mean.shape, generator, like=mean)
        return chosen, self.likelihood(features, chosen).logprob

    def likelihood(self, features: Mapping[str, Tensor], chosen: Tensor) -> Likelihood:
        """Of ``chosen`` [B,...], N numbers each, summed in float64 to keep the precision of ratios."""
        mean, std = self(features)
        terms = -0.5 * ((chosen.flatten(1) - mean) / std).square() - std.log() - 0.5 * _LOG_2PI
        entropy = (std.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1, dtype=torch.float64)
        params = {"mean": mean[:, None], "std": std[:, None]}
        return Likelihood(terms.sum(-1, dtype=torch.float64), entropy, params)


def log_tanh_derivative(u: Tensor) -> Tensor:
    """``log(1 - tanh(u)^2)``, stable for any ``u``."""
    return 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))


def zero_init(layer: nn.Linear) -> nn.Linear:
    """``layer`` with weights and biases 0."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class HoldsFrozen(ObservationPolicy):
    """A policy on top of others in ``_frozen``, its constructor's first arguments, which are no submodules of it.

    So they are neither trained nor saved with its weights nor cast to its dtype, and they may be black boxes without
    tensors.  ``to(device)`` moves those that are modules.  A checkpoint has a folder for each, called as in ``parts``.
    """

    parts: ClassVar[tuple[str, ...]] = ("base",)
    spec: EnvSpec
    config: Any
    _frozen: tuple[Any, ...]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda`` and ``cpu`` call."""
        super()._apply(fn, recurse)
        for part in self._frozen:
            if isinstance(part, nn.Module):
                part.to(self.action_low.device)
        return self

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` and the frozen policies, with their present weights."""
        inside = {name: part for name, part in zip(self.parts, self._frozen, strict=True) if part is not None}
        config = {"policy": name_of(type(self)), "config": to_json(self.config), "spec": self.spec.to_json()}
        save_folder(Path(folder), {**config, "inside": sorted(inside)}, self.state_dict(), inside)

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> Self:
        """Load a checkpoint; with ``spec``, what is frozen checks that it was trained for such an environment."""
        saved, build = read_config(Path(folder)), cast(Any, cls)  # the subclasses' constructors
        frozen = [load_policy(Path(folder) / name, spec) if name in saved["inside"] else None for name in cls.parts]
        policy: Self = build(*frozen, from_json(saved["config"]))
        load_weights(policy, Path(folder))
        return policy.eval()


class ObservationEncoder(Saveable, Protocol):
    """A frozen policy, of which a head (residual, latent noise, squashed Gaussian, diffusion) uses the encoder only.

    spec           the environment that the policy was trained for
    feature_sizes  {name: size} of the entries of ``encode`` that a head may act on, flattened; critics add ``time``
    encode         {name: [E,...]}: the entries of ``feature_sizes``, ``time`` [E,1] as a share of the time limit, and
                   whatever else the policy itself needs.  They are normalised by the policy's own statistics as far as
                   it normalises anything; a head standardises them again (``calibrate``), so no scale is assumed.
    """

    @property
    def spec(self) -> EnvSpec: ...

    @property
    def feature_sizes(self) -> Mapping[str, int]: ...

    def encode(self, obs: Observation) -> Features: ...
