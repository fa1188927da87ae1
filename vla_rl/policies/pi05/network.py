"""pi0.5 (arXiv 2504.16054): pi0's network with the state in its prompt, and the time in every norm of its expert.

Shape letters as in ``vla/network.py``; ``W`` is the width of the expert.  Tensor names are LeRobot's and openpi's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.policies.pi0.network import Pi0Network, Pi0Shape, waves
from vla_rl.policies.vla.network import (
    FusedLayer,
    Layer,
    ModuleLayer,
    Run,
    epsilon_of,
    exact,
    linear,
    normalized,
    plainly,
)

_OWN = ("action_in_proj.", "time_mlp_in.", "time_mlp_out.")  # parts outside the expert whose names are public ones


@dataclass(frozen=True)
class Pi05Shape(Pi0Shape):
    """Sizes of a pi0.5; the defaults are those of the public checkpoints.  ``state_size``: the longest state."""

    def build(self) -> Pi05Network:
        return Pi05Network(self)


class AdaptiveNorm(nn.Module):
    """Scale, shift and gate of an RMSNorm without weights of its own, by what ``dense`` makes of the time."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)


def adapted(hidden: Tensor, modulation: Tensor, epsilon: float) -> Tensor:
    """``hidden`` [B,L,W] normalised, scaled and shifted by ``modulation`` [B,L or 1,3W]."""
    scale, shift, _ = modulation.chunk(3, -1)
    return torch.addcmul(shift, normalized(hidden, None, epsilon), 1.0 + scale)


@dataclass(frozen=True)
class AdaptiveLayer(ModuleLayer):
    """A layer of Gemma whose norms and residual connections the time adapts.

    ``modulations``: of its two norms, [B,L or 1,3W] each, once :meth:`at` has made them.
    """

    modulations: tuple[Tensor, ...] = ()

    def at(self, time: Tensor, spread: Callable[[Tensor], Tensor]) -> AdaptiveLayer:
        """The layer at ``time`` [Bk,W], what it makes of which is ``spread`` over the tokens."""
        norms = self.layer.input_layernorm, self.layer.post_attention_layernorm
        return replace(self, modulations=tuple(spread(linear(norm.dense, time)) for norm in norms))

    def normed(self, hidden: Tensor, part: int) -> Tensor:
        return adapted(hidden, self.modulations[part], epsilon_of(self.layer.input_layernorm))

    def added(self, hidden: Tensor, change: Tensor, part: int) -> Tensor:
        return torch.addcmul(hidden, change, self.modulations[part].chunk(3, -1)[2])

    def fused(self) -> FusedAdaptiveLayer:
        norms = self.layer.input_layernorm, self.layer.post_attention_layernorm
        weight, bias = (torch.cat([getattr(norm.dense, name) for norm in norms]) for name in ("weight", "bias"))
        return FusedAdaptiveLayer(**self.parts(), dense=weight.to(self.dtype), bias=bias.to(self.dtype))


@dataclass(frozen=True)
class FusedAdaptiveLayer(FusedLayer):
    """The same as tensors: one product makes both modulations."""

    dense: Tensor | None = None
    bias: Tensor | None = None
    modulations: tuple[Tensor, ...] = ()

    def at(self, time: Tensor, spread: Callable[[Tensor], Tensor]) -> FusedAdaptiveLayer:
        assert self.dense is not None
        both = spread(functional.linear(time, self.dense, self.bias))
        return replace(self, modulations=both.chunk(2, -1))

    def normed(self, hidden: Tensor, part: int) -> Tensor:
        return adapted(hidden, self.modulations[part], self.epsilon)

    def added(self, hidden: Tensor, x: Tensor, weight: Tensor, part: int) -> Tensor:
        return torch.addcmul(hidden, functional.linear(x, weight), self.modulations[part].chunk(3, -1)[2])


class Pi05Network(Pi0Network):
    """A :class:`~vla_rl.policies.vla.network.FlowNetwork` with the parts of pi0 but for what the time goes through."""

    shape: Pi05Shape

    def __init__(self, shape: Pi05Shape) -> None:
        super().__init__(shape)
        width, expert = shape.expert_hidden_size, self.model.dit
        self.embed_action_time = None
        self.action_in_proj = nn.Linear(shape.action_size, width)
        self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        for layer in expert.layers:
            for name in ("input_layernorm", "post_attention_layernorm"):
                setattr(layer, name, AdaptiveNorm(width, epsilon_of(getattr(layer, name))))
        expert.norm = AdaptiveNorm(width, epsilon_of(expert.norm))

    @staticmethod
    def public_name(name: str) -> str | None:
        bare = name.removeprefix("model.")
        return bare if bare.startswith(_OWN) else Pi0Network.public_name(name)

    def condition(
        self, prefix: Mapping[str, Tensor], state: Tensor, layers: Sequence[Layer] = (), run: Run = plainly
    ) -> dict[str, Tensor]:
        """``I.cache`` [B,2g,P,d] for every layer ``I`` of the expert, and their ``mask``, if any.

        The ``state`` is in the prompt.
        """
        found = {"mask": prefix["mask"]} if "mask" in prefix else {}
        caches = prefix["cache"].to(self.computes_in(self.model.dit)).unbind(1)
        return {**found, **{f"{i}.cache": cache for i, cache in enumerate(caches)}}

    def noisy(
        self, x: Tensor, t: Tensor, points: int, layers: Sequence[Any], dtype: torch.dtype
    ) -> tuple[Tensor, Sequence[Layer], Callable[[Tensor], Tensor]]:
        time = functional.silu(linear(self.time_mlp_in, exact(waves(t, self.shape).to(x.dtype))))
        time = functional.silu(linear(self.time_mlp_out, time)).to(dtype)
        hidden = linear(self.action_in_proj, exact(x)).to(dtype).unflatten(0, (-1, points)).flatten(1, 2)

        def spread(modulation: Tensor) -> Tensor:
            """[Bk,n] as [B,1,n], or where a sample has several points, for each of its tokens, [B,kC,n]."""
            each = modulation.unflatten(0, (-1, points))
            return each if points == 1 else each.repeat_interleave(x.shape[1], 1)

        last: AdaptiveNorm = self.model.dit.norm
        end = spread(linear(last.dense, time))
        return hidden, [layer.at(time, spread) for layer in layers], lambda found: adapted(found, end, last.eps)

    def expert_layers(self) -> list[ModuleLayer]:
        dtype = self.computes_in(self.model.dit)
        return [AdaptiveLayer(layer, dtype) for layer in self.model.dit.layers]
