"""What a Llama layer computes, in parts: the language model and the expert of SmolVLA attend to each other's keys.

Shapes: ``B`` batch, ``L`` tokens, ``h`` heads, ``g`` heads of keys and values, ``d`` size of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

WAVELENGTH = 10_000.0  # of RoPE: LeRobot's, whatever the language model's own configuration says


def normalized(norm: Any, hidden: Tensor) -> Tensor:
    """``hidden`` [B,L,width] through the weights of a LlamaRMSNorm, which itself would round float64 to float32."""
    return functional.rms_norm(hidden, norm.weight.shape, norm.weight.to(hidden.dtype), norm.variance_epsilon)


def angles(positions: Tensor, head_size: int) -> Tensor:
    """Cosines and sines float32 [2,B,L,1,d/2] of RoPE (arXiv 2104.09864) at ``positions`` [B,L]."""
    half = torch.arange(head_size // 2, dtype=torch.float32, device=positions.device)
    radians = positions[..., None].float() / WAVELENGTH ** (half * (2.0 / head_size))
    return torch.stack((radians.cos(), radians.sin())).unsqueeze(-2)


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """Queries or keys ``x`` [B,L,h,d] turned by :func:`angles`: entry ``i`` pairs with entry ``i + d/2``."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    cos, sin = angle
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def split(projection: Any, hidden: Tensor, head_size: int) -> Tensor:
    """``hidden`` [B,L,...] through a query, key or value projection, [B,L,heads,d]."""
    return projection(hidden).unflatten(-1, (-1, head_size))


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of ``query`` [B,L,h,d] to ``key`` and ``value`` [B,M,g,d] where ``mask`` bool [B or 1,L or 1,M] is
    true, [B,L,h*d].

    Consecutive ``h/g`` heads share their keys.  They become queries of one head, so that no kernel copies keys: not
    all of them know shared keys.
    """
    batch, length, heads, size = query.shape
    shared = heads // key.shape[2]
    folded = query.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B,g,h/g*L,d]
    if mask.shape[1] > 1:
        mask = mask.repeat(1, shared, 1)
    out = functional.scaled_dot_product_attention(
        folded, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask.unsqueeze(1), scale=1.0 / math.sqrt(size)
    )
    return out.unflatten(2, (shared, length)).permute(0, 3, 1, 2, 4).reshape(batch, length, heads * size)


def finished(layer: Any, hidden: Tensor, attention: Tensor) -> Tensor:
    """The rest of a layer after its attention: both residual connections and the feed-forward part."""
    hidden = hidden + layer.self_attn.o_proj(attention)
    return hidden + layer.mlp(normalized(layer.post_attention_layernorm, hidden))
