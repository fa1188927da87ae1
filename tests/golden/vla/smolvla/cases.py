"""What LeRobot's SmolVLA and ours are compared on: configurations of folders, and inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

CAMERAS = {"observation.images.top": (24, 40), "observation.images.wrist": (32, 32)}  # height and width
MISSING = ("observation.images.left", "observation.images.right")
STATE, ACTION, CHUNK = 5, 4, 6
TIMES = (1.0, 0.62, 0.3, 0.001)
FENCE = (61, 62)  # the tokens that stand for <fake_token_around_image> and <global-img>
# The vision-language model's config.json.  LeRobot's RoPE ignores rope_theta, and 2 of the 6 layers are not used.
VLM: dict[str, Any] = {
    "scale_factor": 2,
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "text_config": {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    },
}
_CONFIG: dict[str, Any] = {
    "max_state_dim": 8,
    "max_action_dim": 7,
    "chunk_size": CHUNK,
    "n_action_steps": CHUNK,
    "num_vlm_layers": 4,
    "resize_imgs_with_padding": [32, 32],
    "vlm_model_name": "a/small-one",
}


@dataclass(frozen=True)
class Case:
    """``lengths``: of the prompts of a batch; ``missing``: cameras of the checkpoint without a picture."""

    lengths: tuple[int, ...]
    missing: int = 0
    changed: dict[str, Any] = field(default_factory=dict)
    bfloat16: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The folder's ``config.json``, as far as the network goes."""
        return {**_CONFIG, "empty_cameras": self.missing, **self.changed}


CASES = {
    "padded prompts and a missing camera": Case((5, 2, 7), missing=1),
    "one row": Case((4,)),
    "bfloat16": Case((5, 2, 7), missing=1, bfloat16=True),
    "tokens around pictures": Case((3, 6), missing=2, changed={"add_image_special_tokens": True}),
    "a prefix of fixed length": Case((3, 6), changed={"prefix_length": 30}),
    "cross-attention alone, fewer layers": Case(
        (3, 6), changed={"num_expert_layers": 2, "self_attn_every_n_layers": -1}
    ),
    "self-attention alone": Case((3, 6), changed={"attention_mode": "self_attn", "expert_width_multiplier": 0.5}),
}


def inputs(name: str, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Pictures uint8 [B,h,w,3] by camera, ``tokens`` and ``mask`` [B,L], and what is normalised already."""
    case = CASES[name]
    batch, longest = len(case.lengths), max(case.lengths)
    pictures = {camera: draw.integers(0, 256, (batch, *size, 3), dtype=np.uint8) for camera, size in CAMERAS.items()}
    return {
        **pictures,
        "tokens": draw.integers(0, 60, (batch, longest)),
        "mask": np.arange(longest) < np.array(case.lengths)[:, None],
        "state": draw.standard_normal((batch, STATE)).astype(np.float32),
        "action": draw.standard_normal((batch, CHUNK, ACTION)).astype(np.float32),
        "noise": draw.standard_normal((batch, CHUNK, 7)).astype(np.float32),
        "time": draw.uniform(0.001, 1.0, batch).astype(np.float32),
    }
