"""Value functions, separate from policies; they read the policy's features and ``privileged/*`` observations."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.batch import Reducer
from vla_rl.policies.heads import HeadConfig, Inputs, Trunk, zero_init
from vla_rl.policies.image_encoder import Activation, ImageEncoder, hidden_layers
from vla_rl.policies.normalization import RunningStandardizer


class ValueCritic(nn.Module):
    """``V(o)`` [B] from chosen features of a rollout, flattened and concatenated.

    With ``privileged/*`` among them it is the critic of an asymmetric actor-critic (Pinto et al. 2018, arXiv
    1710.06542): it reads what the policy must not read, and is used in training only.  Features are data, so no
    gradient reaches the policy.  ``calibrate`` standardises the inputs.  ``vision``, if given, adds features of pixels
    and is trained with the critic.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        width: int = 128,
        depth: int = 2,
        vision: ImageEncoder | None = None,
        activation: Activation = "tanh",
    ) -> None:
        super().__init__()
        self.vision = vision
        size = sum(sizes.values()) + (vision.size if vision else 0)
        self.inputs = Inputs(sizes)
        self.body = nn.Sequential(*hidden_layers(size, width, depth, activation))
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        inputs = self.inputs(features)
        if self.vision is not None:
            inputs = torch.cat([inputs, self.vision(features)], -1)
        return self.head(self.body(inputs)).squeeze(-1)

    @torch.no_grad()
    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Set the input mean and standard deviation from all processes' data; call once, before the first update."""
        self.inputs.calibrate(features, reducer)


class RunningCritic(ValueCritic):
    """A ``ValueCritic`` whose inputs are standardised by the statistics of all rollouts so far (an ``Observer``).

    Use it for observations whose range grows as the policy improves, such as velocities.
    """

    def __init__(self, sizes: Mapping[str, int], *network: Any, **more: Any) -> None:
        """As for ``ValueCritic``."""
        super().__init__(sizes, *network, **more)
        self.statistics = RunningStandardizer(self.inputs.size)

    @torch.no_grad()
    def observe(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        """Merge {name: [B,...]} into the statistics by which inputs are standardised."""
        self.statistics.observe(self.inputs.concatenate(features), reducer)
        self.inputs.mean.copy_(self.statistics.mean)
        self.inputs.std.copy_(self.statistics.variance.sqrt().clamp_min(1e-2))


class QEnsemble(nn.Module):
    """``K`` independent action values ``Q_k(o, a)`` [K,B], each a network with LayerNorm, computed in one batch.

    ``o`` are chosen features of a policy, ``a`` [B,A] an action in the form of ``CriticAction``.  LayerNorm bounds the
    values of actions that are not in the data (Ball et al. 2023, RLPD, arXiv 2302.02948).
    """

    def __init__(
        self, sizes: Mapping[str, int], actions: int, num_critics: int = 10, config: HeadConfig | None = None
    ) -> None:
        super().__init__()
        config = config or HeadConfig()
        self.num_critics, self.inputs = num_critics, Inputs(sizes)
        widths = [self.inputs.size + actions] + [config.width] * config.depth
        self.layers = nn.ModuleList(_HiddenLayer(num_critics, *pair) for pair in pairwise(widths))
        self.last = _Linears(num_critics, config.width, 1)

    def forward(self, features: Mapping[str, Tensor], action: Tensor) -> Tensor:
        x = torch.cat([self.inputs(features), action.to(self.inputs.mean)], -1)
        x = x.expand(self.num_critics, *x.shape)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).squeeze(-1)

    def calibrate(self, features: Mapping[str, Tensor], reducer: Reducer) -> None:
        self.inputs.calibrate(features, reducer)


class _Linears(nn.Module):
    """``K`` linear layers, initialised as PyTorch does, from [K,B,inputs] to [K,B,outputs]."""

    def __init__(self, num_critics: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(num_critics, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_critics, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class _HiddenLayer(nn.Module):
    """One hidden layer of all ``K`` networks: linear, LayerNorm, SiLU."""

    def __init__(self, num_critics: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = _Linears(num_critics, inputs, outputs)
        self.scale = nn.Parameter(torch.ones(num_critics, 1, outputs))
        self.shift = nn.Parameter(torch.zeros(num_critics, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.layer_norm(self.linear(x), self.scale.shape[-1:])
        return functional.silu(normed * self.scale + self.shift)


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
