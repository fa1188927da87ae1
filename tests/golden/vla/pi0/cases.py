"""What transformers' pi0 and ours are compared on: sizes and inputs, by rule.  Needs numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.golden.vla.weights import generator

SIDE, PATCHES, VOCABULARY = 28, 4, 300  # of a picture; tokens of a picture; words
CHUNK, ACTION, STATE, STEPS = 5, 7, 6, 4
TIMES = (1.0, 0.62, 0.3, 0.001)
# config.json of transformers' PI0ForConditionalGeneration
GEMMA: dict[str, Any] = {
    "model_type": "gemma",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}
CONFIG: dict[str, Any] = {
    "model_type": "pi0",
    "vlm_config": {
        "model_type": "paligemma",
        "text_config": {**GEMMA, "hidden_size": 32, "intermediate_size": 48},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 14,
            "image_size": SIDE,
            "projection_dim": 32,
            "vision_use_head": False,
        },
        "projection_dim": 32,
        "image_token_id": VOCABULARY,
    },
    "dit_config": {**GEMMA, "hidden_size": 24, "intermediate_size": 40},
    "chunk_size": CHUNK,
    "max_action_dim": ACTION,
    "max_state_dim": STATE,
}


@dataclass(frozen=True)
class Case:
    """``lengths``: of the prompts of a batch; ``cameras``: which of the checkpoint's have a picture."""

    lengths: tuple[int, ...]
    cameras: tuple[bool, ...] = (True, True)


CASES = {
    "one row": Case((4,)),
    "padded prompts": Case((5, 2, 7)),
    "padded prompts and a missing camera": Case((5, 2, 7), (True, False, True)),
}


def inputs(case: Case) -> dict[str, np.ndarray]:
    """``pictures`` uint8 [cameras,B,h,w,3], ``tokens`` and ``mask`` [B,L], ``state``, ``noise``, ``actions``, ``time``.

    State and actions are normalised and padded.
    """
    draw, batch, longest = generator("inputs of pi0"), len(case.lengths), max(case.lengths)
    mask = np.arange(longest) < np.array(case.lengths)[:, None]
    return {
        "pictures": draw.integers(0, 256, (len(case.cameras), batch, SIDE, SIDE, 3), dtype=np.uint8),
        "tokens": np.where(mask, draw.integers(3, VOCABULARY, mask.shape), 0),
        "mask": mask,
        "state": draw.standard_normal((batch, STATE)).astype(np.float32),
        "noise": draw.standard_normal((batch, CHUNK, ACTION)).astype(np.float32),
        "actions": draw.standard_normal((batch, CHUNK, ACTION)).astype(np.float32),
        "time": draw.uniform(0.1, 0.9, batch).astype(np.float32),
    }


PICTURES = ((20, 33), (41, 30), (28, 29), (50, 50), (72, 128))  # height and width of pictures that must be fitted


def picture(size: tuple[int, int]) -> np.ndarray:
    """uint8 [1,h,w,3]: noise, the hardest to resize."""
    return generator(f"picture {size}").integers(0, 256, (1, *size, 3), dtype=np.uint8)


# LeRobot's pi0: its heads are 8 and 16 whatever the sizes, and roots of these widths are powers of two.
LEROBOT_CAMERAS = {"observation.images.base_0_rgb": (20, 33), "observation.images.left_wrist_0_rgb": (SIDE, SIDE)}
LEROBOT_MISSING = "observation.images.right_wrist_0_rgb"
LEROBOT_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
LEROBOT_EXPERT = {"hidden_size": 16, "intermediate_size": 40}
LEROBOT_VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "projection_dim": 64}
LEROBOT_LENGTHS = {"one row": (4,), "padded prompts": (5, 2, 7)}
# Of pi0.5, whose prompt the state is in: edges of bins, beyond them, and instructions that are tidied up.
LEROBOT_TASKS = ("lift the cube", " open_it\n", "lift it")
LEROBOT_STATES = ((-1.0, 1.0, 0.0, 0.4), (-1.5, 7.0, -0.0078125, 0.0078125), (-0.999, 0.999, 0.5, -0.25))
# It is lm_head.weight too, and a file holds one of them.
LEROBOT_TIED = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


def lerobot_inputs(name: str) -> dict[str, np.ndarray]:
    """Pictures uint8 [B,h,w,3] by camera; ``tokens``, ``mask``, ``state``, ``noise`` as in :func:`inputs`."""
    given, batch = inputs(Case(LEROBOT_LENGTHS[name])), len(LEROBOT_LENGTHS[name])
    draw = generator("pictures for LeRobot's pi0")
    pictures = {
        camera: draw.integers(0, 256, (batch, *size, 3), dtype=np.uint8) for camera, size in LEROBOT_CAMERAS.items()
    }
    return {**pictures, **{key: given[key] for key in ("tokens", "mask", "state", "noise")}}
