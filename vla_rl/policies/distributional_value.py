"""A value function that predicts the distribution of returns in bins, as RECAP's does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.batch import Reducer
from vla_rl.policies.heads import HeadConfig, Trunk, zero_init


class DistributionalValue(nn.Module):
    """``p(G | o)`` over ``bins`` returns from -1 to 0, and its mean ``V(o)`` (pi*0.6, arXiv 2511.14759).

    Returns between two bins are split among them so that the mean is kept (two-hot, as in Bellemare et al. 2017, arXiv
    1707.06887).  It is uniform at first.  Features are data: no gradient reaches the policy.
    """

    returns: Tensor

    def __init__(self, sizes: Mapping[str, int], config: HeadConfig | None = None, bins: int = 201) -> None:
        super().__init__()
        config = config or HeadConfig(128)
        self.trunk = Trunk(sizes, config)
        self.last = zero_init(nn.Linear(config.width, bins))
        self.register_buffer("returns", torch.linspace(-1.0, 0.0, bins), persistent=False)

    def logits(self, features: Mapping[str, Tensor]) -> Tensor:
        """Of the bins, [B,bins]."""
        return self.last(self.trunk(features))

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """``V(o)`` [B] in [-1, 0]."""
        return self.logits(features).softmax(-1) @ self.returns

    def loss(self, features: Mapping[str, Tensor], target: Tensor) -> Tensor:
        """The mean cross-entropy to the returns ``target`` [B] in [-1, 0] (nats)."""
        return functional.cross_entropy(self.logits(features), two_hot(target, len(self.returns)))

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Set the input mean and standard deviation from data; call once, before the first step."""
        self.trunk.inputs.calibrate(features, reducer)


def two_hot(target: Tensor, bins: int) -> Tensor:
    """The weights [B,bins] of returns ``target`` [B] from -1 to 0: at most two are not 0, and their mean is kept."""
    place = (target + 1.0) * (bins - 1)
    below = place.floor().clamp(0, bins - 2).long()
    upper = (place - below)[:, None]
    found = torch.zeros(len(target), bins, dtype=target.dtype, device=target.device)
    return found.scatter(1, below[:, None], 1.0 - upper).scatter(1, below[:, None] + 1, upper)
