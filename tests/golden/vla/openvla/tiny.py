"""A tiny OpenVLA whose every weight follows from its name, for the golden data and for the tests that read them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

SIDE, PATCH, HEADS = 28, 14, 16  # pixels; 16 heads as both published vision transformers have
DINO: dict[str, int] = {"embed_dim": 32, "depth": 3, "mlp_ratio": 2}
SIGLIP: dict[str, int] = {"embed_dim": 48, "depth": 3, "mlp_ratio": 2}
PADDING, BINS = 64, 256
LLAMA: dict[str, Any] = {
    "vocab_size": 384,  # 64 words, 256 actions, 64 rows of padding
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 63,
}
PROMPTS = ((1, 7, 8, 9, 29), (1, 7, 30, 31, 11, 12, 29), (1, 8, 29))  # token ids, of different lengths
CAMERAS, ENTRIES, ACTIONS = 2, 3, 2  # pictures of an observation; D; actions of a parallel chunk
# OpenVLA-OFT's continuous heads: its own classes end every prompt in this token, and have LIBERO's sizes.
EMPTY = 29871
OFT_LLAMA = {**LLAMA, "vocab_size": 32064}  # as published
OFT_PROMPTS = tuple((*prompt, EMPTY) for prompt in PROMPTS)
OFT_ACTIONS, OFT_ENTRIES, OFT_STATE = 8, 7, 8
TIMESTEPS = (0, 20, 49)  # of 50, at which noise is predicted, one for each prompt


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32: small normal numbers from a generator that is seeded by the tensor's name; norms are around one."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("norm.weight") or "norm1.weight" in name or "norm2.weight" in name or "layernorm.weight" in name:
        return (1.0 + 0.1 * numbers).astype(np.float32)
    if "scale_factor" in name:
        return (0.5 + 0.1 * numbers).astype(np.float32)
    return (0.2 * numbers).astype(np.float32)


def pictures(count: int) -> np.ndarray:
    """uint8 [CAMERAS,count,h,w,3]: soft stripes, so that resizing and cropping are well defined."""
    rows, columns = np.mgrid[:SIDE, :SIDE] / SIDE
    found = [
        128 + 120 * np.sin(3.0 * rows * (1 + k) + 2.0 * columns * (2 + c) + channel + 0.7 * c * k)
        for c in range(CAMERAS)
        for k in range(count)
        for channel in range(3)
    ]
    stacked = np.stack(found).reshape(CAMERAS, count, 3, SIDE, SIDE)
    return np.moveaxis(stacked, 2, -1).round().astype(np.uint8)


def states() -> np.ndarray:
    """float32 [rows,OFT_STATE]: normalised states within [-1, 1]."""
    return np.random.default_rng(1).uniform(-1, 1, (len(PROMPTS), OFT_STATE)).astype(np.float32)


def chunks() -> np.ndarray:
    """float32 [rows,OFT_ACTIONS,OFT_ENTRIES]: normalised actions to imitate."""
    return np.random.default_rng(2).uniform(-1, 1, (len(PROMPTS), OFT_ACTIONS, OFT_ENTRIES)).astype(np.float32)
