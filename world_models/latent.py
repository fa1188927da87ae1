"""A latent model of decisions: what a chunk leads to, in what critics need of it, without a picture being predicted.

    z = e(o)        z'_k = z + d_k(z, a)        r_k(z, a), end_k(z, a), v(z)

An ensemble of ``K`` predicts the latent state after a chunk, its reward and whether the task ends.  Trained by
self-prediction against a slow copy of the encoder (TD-MPC2, Hansen et al. 2024, arXiv 2310.16828), rewards, ends, and
the critics' value of the state that was reached, at the predicted latent state as well: errors count by what they
change of the value (VaGraM, Voelcker et al. 2022, arXiv 2204.01464, in its simplest form).  Nothing is reconstructed.
Inputs are a policy's features, so no camera, success flag or particular policy is needed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.limits import check_limits, check_positive


@dataclass(frozen=True)
class LatentConfig:
    """Sizes and weights of the losses."""

    width: int = 128
    members: int = 4
    lr: float = 3e-4
    tau: float = 0.01  # rate of the slow copy of the encoder
    self_prediction: float = 1.0
    reward: float = 1.0
    end: float = 0.1
    value: float = 1.0

    def __post_init__(self) -> None:
        check_limits(self, width=(1, math.inf), members=(1, math.inf), tau=(0, 1))
        weights = (0, math.inf)
        check_limits(self, self_prediction=weights, reward=weights, end=weights, value=weights)
        check_positive(self, "lr")


class LatentEncoder(nn.Module):
    """Chosen features, flattened, standardised and encoded: {name: [B,...]} to [B,Z], normalised over Z."""

    mean: Tensor
    std: Tensor

    def __init__(self, sizes: Mapping[str, int], width: int) -> None:
        """``sizes``: of the flattened features, by name."""
        super().__init__()
        self.names, self.width = tuple(sizes), width
        size = sum(sizes.values())
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        self.layers = _network(size, width, width)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        inputs = (self._joined(features) - self.mean) / self.std
        return functional.layer_norm(self.layers(inputs), (self.width,))

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor]) -> None:
        """Standardise by the features of recorded decisions; once, before the first step."""
        inputs = self._joined(features)
        self.mean.copy_(inputs.mean(0))
        self.std.copy_(inputs.std(0).clamp_min(1e-2))

    def _joined(self, features: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([features[name].flatten(1).to(self.mean) for name in self.names], -1)


@dataclass(frozen=True)
class Predicted:
    """After one decision, of ``K`` members: latent states [K,B,Z], rewards [K,B] and probabilities of an end [K,B]."""

    latent: Tensor
    reward: Tensor
    end: Tensor


class LatentModel(nn.Module):
    """The model of decisions of ``actions`` entries, from features of ``sizes``."""

    def __init__(self, sizes: Mapping[str, int], actions: int, config: LatentConfig | None = None) -> None:
        super().__init__()
        self.config = config or LatentConfig()
        width = self.config.width
        self.encoder = LatentEncoder(sizes, width)
        self.slow_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.members = nn.ModuleList(_network(width + actions, width, width + 2) for _ in range(self.config.members))
        self.value_head = _network(width, width, 1)

    def calibrate(self, features: Mapping[str, Tensor]) -> None:
        """See ``LatentEncoder.calibrate``; both copies see the same."""
        self.encoder.calibrate(features)
        self.slow_encoder.calibrate(features)

    def value(self, latent: Tensor) -> Tensor:
        """What the critics expect [...] of the latent states [...,Z]."""
        found: Tensor = self.value_head(latent).squeeze(-1)
        return found

    def predict(self, latent: Tensor, action: Tensor) -> Predicted:
        """After ``action`` [B,A] in the latent states [B,Z]."""
        parts = torch.stack([member(torch.cat([latent, action], -1)) for member in self.members])
        width = self.config.width
        after = functional.layer_norm(latent + parts[..., :width], (width,))
        return Predicted(after, parts[..., width], torch.sigmoid(parts[..., width + 1]))

    def score(self, features: Mapping[str, Tensor], action: Tensor, discount: float) -> Tensor:
        """``r + discount (1 - end) v(z')`` [B] of ``action`` [B,A], the mean of the members."""
        found = self.predict(self.encoder(features), action)
        return (found.reward + discount * (1.0 - found.end) * self.value(found.latent)).mean(0)

    def losses(
        self,
        features: Mapping[str, Tensor],
        action: Tensor,
        reward: Tensor,
        ended: Tensor,
        next_features: Mapping[str, Tensor],
        value: Tensor,
        next_value: Tensor,
    ) -> dict[str, Tensor]:
        """Of ``B`` decisions: their ``reward`` [B], whether the task ``ended`` bool [B], and critics' values [B].

        Where it ended there is no state after it, so nothing is asked about it.
        """
        latent = self.encoder(features)
        found = self.predict(latent, action)
        goes_on = (~ended).to(latent)
        with torch.no_grad():
            target = self.slow_encoder(next_features)
        apart = (found.latent - target).square().mean(-1)
        reached = (self.value(found.latent) - next_value).square()
        certain = found.end.clamp(1e-6, 1 - 1e-6)
        return {
            "self_prediction": (apart * goes_on).mean(),
            "reward": (found.reward - reward).square().mean(),
            "end": functional.binary_cross_entropy(certain, ended.to(certain).expand_as(certain)),
            "value": (self.value(latent) - value).square().mean() + (reached * goes_on).mean(),
        }

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of :meth:`losses`."""
        parts: list[Tensor] = [getattr(self.config, name) * loss for name, loss in losses.items()]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def update_slow_encoder(self) -> None:
        """Move it towards the encoder by ``tau``."""
        for slow, present in zip(self.slow_encoder.parameters(), self.encoder.parameters(), strict=True):
            slow.lerp_(present, self.config.tau)


def _network(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LayerNorm(width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.SiLU(),
        nn.Linear(width, outputs),
    )
