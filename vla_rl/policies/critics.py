"""Value functions, separate from policies; they read what the policy stored, or privileged state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vla_rl.contract.batch import Reducer


class ValueCritic(nn.Module):
    """``V(o)`` [B] from chosen entries of what a policy stored, concatenated (each flattened).

    No gradient reaches the policy: the entries are data.  Inputs are standardised by ``calibrate``.
    """

    def __init__(self, sizes: Mapping[str, int], width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.keys = tuple(sizes)
        size = sum(sizes.values())
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        layers: list[nn.Module] = []
        for i in range(depth):
            layers += [nn.Linear(size if i == 0 else width, width), nn.Tanh()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, stored: Mapping[str, Tensor]) -> Tensor:
        inputs = (self._concatenate(stored) - self.mean) / self.std
        return self.head(self.body(inputs)).squeeze(-1)

    @torch.no_grad()
    def calibrate(self, stored: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Set the input mean and standard deviation from all processes' data; call once, before the first update."""
        inputs = self._concatenate(stored).reshape(-1, self.mean.shape[0]).double()
        count = reducer.sum(torch.tensor(float(len(inputs)), dtype=torch.float64))
        mean = reducer.sum(inputs.sum(0)) / count
        variance = reducer.sum((inputs - mean).square().sum(0)) / (count - 1).clamp_min(1)
        self.mean.copy_(mean)
        self.std.copy_(variance.sqrt().clamp_min(1e-2))

    def _concatenate(self, stored: Mapping[str, Tensor]) -> Tensor:
        lead = stored[self.keys[0]].dim() - 1
        return torch.cat([stored[key].flatten(lead).float() for key in self.keys], -1)
