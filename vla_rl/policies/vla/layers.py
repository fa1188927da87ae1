"""What a layer of Gemma or Llama computes, in parts, for the models that read each other's keys and values.

The same arithmetic runs on two kinds of weights: those of transformers' modules (:class:`ModuleLayer`), where they are
learnt, and copies that lie together (:class:`FusedLayer`), where they act and every kernel costs a launch.

Shapes: ``B`` batch, ``L`` tokens, ``h`` heads, ``g`` heads of keys and values, ``d`` size of a head, ``M`` tokens seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WAVELENGTH = 10_000.0  # of RoPE: LeRobot's and transformers', whatever SmolVLM's own configuration says
Pair = tuple[Tensor, Tensor]
Run = Callable[..., Any]  # (function, *inputs) -> what the function returns


def plainly(function: Callable[..., Any], *inputs: Any) -> Any:
    """The function itself."""
    return function(*inputs)


@dataclass(frozen=True)
class ModuleLayer:
    """A decoder layer of transformers.

    dtype   what it computes in
    offset  what a norm adds to its weights: 1 in Gemma, 0 in Llama
    cross   whether it has queries of its own alone
    """

    layer: Any
    dtype: torch.dtype
    offset: float = 0.0
    cross: bool = False

    @property
    def shared(self) -> int:
        """``g``."""
        return int(self.layer.self_attn.config.num_key_value_heads)

    def projected(self, hidden: Tensor) -> Tensor:
        """Queries, keys and values [B,L,h+2g,d] of ``hidden`` [B,L,width], normalised before; not rotated."""
        attention, inputs = self.layer.self_attn, self._normed(self.layer.input_layernorm, hidden)
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        return torch.cat([linear(part, inputs) for part in parts], -1).unflatten(-1, (-1, attention.head_dim))

    def queried(self, hidden: Tensor) -> Tensor:
        """The queries alone, [B,L,h,d]."""
        attention, inputs = self.layer.self_attn, self._normed(self.layer.input_layernorm, hidden)
        return linear(attention.q_proj, inputs).unflatten(-1, (-1, attention.head_dim))

    def finished(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """The rest of the layer after its attention [B,L,h*d]: both residual connections and the feed-forward part."""
        hidden, mlp = hidden + linear(self.layer.self_attn.o_proj, seen), self.layer.mlp
        inputs = self._normed(self.layer.post_attention_layernorm, hidden)
        wide = mlp.act_fn(linear(mlp.gate_proj, inputs)) * linear(mlp.up_proj, inputs)
        return hidden + linear(mlp.down_proj, wide)

    def fused(self) -> FusedLayer:
        """The same with weights that lie together, in ``dtype``."""
        attention, mlp = self.layer.self_attn, self.layer.mlp
        inputs = (attention.q_proj,) if self.cross else (attention.q_proj, attention.k_proj, attention.v_proj)
        before, after = self.layer.input_layernorm, self.layer.post_attention_layernorm
        return FusedLayer(
            before=(before.weight + self.offset).to(self.dtype),
            after=(after.weight + self.offset).to(self.dtype),
            inputs=self._together(*inputs),
            out=self._together(attention.o_proj),
            wide=self._together(mlp.gate_proj, mlp.up_proj),
            down=self._together(mlp.down_proj),
            activation=mlp.act_fn,
            epsilon=_epsilon(before),
            head_size=attention.head_dim,
            shared=self.shared,
        )

    def _together(self, *parts: Any) -> Tensor:
        return torch.cat([_weight(part).to(self.dtype) for part in parts])

    def _normed(self, norm: Any, hidden: Tensor) -> Tensor:
        return normalized(hidden, norm.weight + self.offset if self.offset else norm.weight, _epsilon(norm))


@dataclass(frozen=True)
class FusedLayer:
    """The same as six tensors: one product makes queries, keys and values, another both halves of the MLP."""

    before: Tensor
    after: Tensor
    inputs: Tensor
    out: Tensor
    wide: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    epsilon: float
    head_size: int
    shared: int

    def projected(self, hidden: Tensor) -> Tensor:
        normed = normalized(hidden, self.before, self.epsilon)
        return functional.linear(normed, self.inputs).unflatten(-1, (-1, self.head_size))

    queried = projected  # where a layer has only queries, ``inputs`` are theirs

    def finished(self, hidden: Tensor, seen: Tensor) -> Tensor:
        hidden = _added(hidden, seen, self.out)
        wide = functional.linear(normalized(hidden, self.after, self.epsilon), self.wide)
        gate, up = wide.chunk(2, -1)
        return _added(hidden, self.activation(gate) * up, self.down)


Layer = ModuleLayer | FusedLayer


def _added(hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``hidden + x @ weight.T`` in one kernel."""
    return torch.addmm(hidden.flatten(0, 1), x.flatten(0, 1), weight.t()).view_as(hidden)


def linear(part: Any, x: Tensor) -> Tensor:
    """``x`` through a linear part, computed in the dtype of ``x``: of float32 weights, which learn, a copy is rounded.

    An adapter's part and one of which every process holds a shard round by themselves.
    """
    if type(part) is not nn.Linear:
        return part(x).to(x.dtype)
    return functional.linear(x, part.weight.to(x.dtype), None if part.bias is None else part.bias.to(x.dtype))


def _weight(part: Any) -> Tensor:
    """The weight of a linear part, with that of its adapter, if it has one."""
    weight: Tensor = part.weight
    for adapter in getattr(part, "active_adapters", ()):
        weight = weight + part.get_delta_weight(adapter)
    return weight


def _epsilon(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def normalized(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of ``hidden`` [B,L,width] (arXiv 1910.07467); transformers' own would round float64 to float32."""
    return functional.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), epsilon)


def rotations(positions: Tensor, head_size: int, dtype: torch.dtype = torch.float32) -> Pair:
    """Cosines and signed sines [B,L,1,d] of RoPE (arXiv 2104.09864) at ``positions`` [B,L], computed in float32."""
    half = torch.arange(head_size // 2, dtype=torch.float32, device=positions.device)
    radians = (positions[..., None].float() / WAVELENGTH ** (half * (2.0 / head_size))).unsqueeze(-2)
    cos, sin = radians.cos(), radians.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotated(x: Tensor, rotation: Pair) -> Tensor:
    """Queries or keys ``x`` [B,L,h,d] turned by :func:`rotations`: entry ``i`` pairs with entry ``i + d/2``."""
    cos, sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of ``query`` [B,h,L,d] to ``key`` and ``value`` [B,g,M,d], [B,L,h*d].

    ``bias`` is that of :func:`bias_of`, None where everything is seen.  Consecutive ``h/g`` heads share their keys,
    which no kernel copies: those that take a bias do not know shared keys, so there they become queries of one head.
    """
    (_, heads, length, _), groups = query.shape, key.shape[1]
    if bias is None:
        out = functional.scaled_dot_product_attention(query, key, value, enable_gqa=heads != groups)
        return out.transpose(1, 2).flatten(2)
    shared = heads // groups
    folded = query.unflatten(1, (groups, shared)).flatten(2, 3)
    out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=bias)
    return out.unflatten(2, (shared, length)).permute(0, 3, 1, 2, 4).flatten(2)


def bias_of(seen: Tensor, dtype: torch.dtype, shared: int = 1) -> Tensor:
    """What :func:`attended` adds to logits: 0 where ``seen`` bool [B or 1,1,L,M] is true, elsewhere -inf.

    [B or 1,1,L,M] if ``L`` is 1, for all queries; else [B or 1,1,shared*L,M] for ``shared = h/g`` heads.  Rows are
    eight numbers apart or a multiple, since a kernel would copy others in every layer.
    """
    seen = seen.repeat(1, 1, shared if seen.shape[2] > 1 else 1, 1)
    room = 8 * math.ceil(seen.shape[-1] / 8)
    bias = torch.zeros((*seen.shape[:-1], room), dtype=dtype, device=seen.device)[..., : seen.shape[-1]]
    return bias.masked_fill_(~seen, -math.inf)


def padded(mask: Tensor) -> Tensor:
    """``mask`` bool [B,M] with a token more, which counts."""
    return functional.pad(mask, (0, 1), value=True)


def mean_where(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """The mean [B,width] of ``hidden`` [B,M,width] over the tokens that count, ``mask`` bool [B,M]; None: all."""
    if mask is None:
        return hidden.mean(1)
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def rounding(dtype: torch.dtype, module: nn.Module) -> AbstractContextManager[Any]:
    """In it, a ``module`` of transformers computes in ``dtype`` although its weights, which learn, are float32."""
    weight = next(module.parameters())
    if weight.dtype == dtype:
        return nullcontext()
    return torch.autocast(weight.device.type, dtype, cache_enabled=False)


def self_attended(layer: Layer, hidden: Tensor, rotation: Pair, bias: Tensor | None, past: Pair | None = None) -> Any:
    """``hidden`` [B,L,width] after a layer, behind the keys and values ``past`` [B,g,P,d], and its own [B,g,L,d]."""
    heads, shared = layer.projected(hidden), layer.shared
    turned = rotated(heads[:, :, :-shared], rotation).transpose(1, 2)
    query, own_key = turned[:, :-shared], turned[:, -shared:]
    own_value = heads[:, :, -shared:].transpose(1, 2)
    key, value = own_key, own_value
    if past is not None:
        key, value = torch.cat((past[0], own_key), 2), torch.cat((past[1], own_value), 2)
    return layer.finished(hidden, attended(query, key, value, bias)), own_key, own_value


def cross_attended(layer: Layer, hidden: Tensor, rotation: Pair, bias: Tensor | None, past: Pair) -> Tensor:
    """``hidden`` [B,L,width] after a layer that sees nothing but the keys and values ``past`` [B,g,P,d]."""
    query = rotated(layer.queried(hidden), rotation).transpose(1, 2)
    return layer.finished(hidden, attended(query, *past, bias))


def points_behind(
    mask: Tensor | None, count: int, points: int, length: int, causal: bool, device: torch.device
) -> Tensor | None:
    """What ``points`` times ``length`` tokens behind ``count`` others see, bool [B or 1,1,kL,M+kL], None: everything.

    ``mask`` bool [B,M]: which of the others they see, None: all.  They see no token of another point and, if
    ``causal``, none after themselves.
    """
    if mask is None and points == 1 and not causal:
        return None
    token = torch.arange(length, device=device).repeat(points)
    point = torch.arange(points, device=device).repeat_interleave(length)
    among = point == point[:, None]
    if causal:
        among = among & (token <= token[:, None])
    before = mask[:, None] if mask is not None else torch.ones(1, 1, count, dtype=torch.bool, device=device)
    before = before.expand(-1, len(token), -1)
    return torch.cat((before, among.expand(len(before), -1, -1)), 2)[:, None]
