"""``python depth.py DATASET``: depth as lerobot 0.6.1 stores it, and beside it, in ``read.npz``, what its loader gives.

That version needs Python 3.12; so ``depth/`` was written once and is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
from lerobot.datasets import LeRobotDataset

SHAPE, LENGTHS = (64, 80, 1), (4, 3)
NAMES = ["height", "width", "channels"]
FILM, STILL = "observation.images.film", "observation.images.still"


def depth(frame: int) -> np.ndarray:
    """uint16 millimetres, from 20 cm to beyond the 10 m that a video holds."""
    ramp = np.geomspace(200, 11000, 64 * 80).reshape(SHAPE)
    return np.roll(ramp, 7 * frame, 1).astype(np.uint16)


def main(root: Path) -> None:
    info = {"is_depth_map": True}
    features = {
        FILM: {"dtype": "video", "shape": SHAPE, "names": NAMES, "info": dict(info)},
        STILL: {"dtype": "image", "shape": SHAPE, "names": NAMES, "info": dict(info)},
        "action": {"dtype": "float32", "shape": (2,), "names": ["a", "b"]},
    }
    written = LeRobotDataset.create("vla-rl/depth", fps=10, features=features, root=root)
    for episode, length in enumerate(LENGTHS):
        for i in range(length):
            still = (depth(10 * episode + i) / 1000).astype(np.float32)  # metres
            action = np.full(2, i, np.float32)
            written.add_frame({FILM: depth(10 * episode + i), STILL: still, "action": action, "task": "look"})
        written.save_episode()
    written.finalize()
    found = {}
    for name, unit in ((FILM, "mm"), (STILL, "m")):
        read = LeRobotDataset("vla-rl/depth", root=root, video_backend="pyav", depth_output_unit=unit)
        found[name] = np.stack([np.asarray(read[i][name]) for i in range(len(read))])[:, 0]
    np.savez_compressed(root / "read.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
