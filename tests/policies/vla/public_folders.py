"""Folders in public formats for tests, and what they are about."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from vla_rl.contract.env import ArraySpec, EnvSpec

GOLDEN = Path(__file__).parents[2] / "golden" / "vla" / "statistics"
SMOLVLA: dict[str, Any] = {
    "type": "smolvla",
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [3]},
        "observation.images.camera1": {"type": "VISUAL", "shape": [3, 256, 320]},
        "observation.images.wrist": {"type": "VISUAL", "shape": [3, 64, 64]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "MIN_MAX"},
    "chunk_size": 50,
    "n_action_steps": 10,
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
}


def write(path: Path, value: object) -> Path:
    """``value`` as JSON in ``path``; returns its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path.parent


def copy_golden(mode: str, folder: Path) -> Path:
    """The processors that LeRobot wrote for ``mode``, in ``folder``."""
    folder.mkdir(exist_ok=True)
    for path in (GOLDEN / mode).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def word_tokenizer(words: Sequence[str], lines: bool = False) -> Tokenizer:
    """A token for each of ``words``, of which the first stands for all others; with ``lines``, line ends count too."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    split = pre_tokenizers.Split
    by_lines = pre_tokenizers.Sequence([split(" ", "removed"), split("\n", "isolated")])
    tokenizer.pre_tokenizer = by_lines if lines else pre_tokenizers.Whitespace()
    return tokenizer


def lerobot_features(cameras: Mapping[str, Sequence[int]], state: int, action: int) -> dict[str, Any]:
    """What LeRobot's config.json says of pictures (name: height and width), and of entries of state and action."""
    pictures = {name: {"type": "VISUAL", "shape": [3, *size]} for name, size in cameras.items()}
    return {
        "input_features": {"observation.state": {"type": "STATE", "shape": [state]}, **pictures},
        "output_features": {"action": {"type": "ACTION", "shape": [action]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    }


def robot_spec(sizes: tuple[int, int], cameras: Mapping[str, tuple[int, int]], **changes: Any) -> EnvSpec:
    """A robot with entries of state and action in these ``sizes``, and ``cameras`` of height and width."""
    state, action = (ArraySpec((size,), "float32", -9.0, 9.0) for size in sizes)
    given: dict[str, Any] = {
        "images": {name: ArraySpec((*size, 3), "uint8", 0, 255) for name, size in cameras.items()},
        "state": state,
        "action": action,
        "tasks": ("lift the cube", "open it"),
        "max_chunk": 4,
    }
    return EnvSpec(name="a robot", control_dt=0.1, time_limit=20, **{**given, **changes})
