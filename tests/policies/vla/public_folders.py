"""Folders in public formats for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
