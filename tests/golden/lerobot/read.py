"""``python read.py DATASET OUT.npz``: everything the real loader gives, frame by frame, as arrays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from real import LeRobotDataset


def main(root: Path, out: Path) -> None:
    """Read all frames, then two at a time as a policy with chunks would, then only the last episode."""
    read = LeRobotDataset("vla-rl/read", root=root, video_backend="pyav")
    frames = [read[i] for i in range(len(read))]
    arrays = {name: np.stack([np.asarray(frame[name]) for frame in frames]) for name in frames[0]}
    ahead = LeRobotDataset(
        "vla-rl/read", root=root, video_backend="pyav", delta_timestamps={"action": [0.0, 1.0 / read.fps]}
    )
    arrays["chunks"] = np.stack([np.asarray(ahead[i]["action"]) for i in range(len(ahead))])
    arrays["padded"] = np.stack([np.asarray(ahead[i]["action_is_pad"]) for i in range(len(ahead))])
    last = LeRobotDataset("vla-rl/read", root=root, video_backend="pyav", episodes=[read.num_episodes - 1])
    arrays["last"] = np.stack([np.asarray(last[i]["action"]) for i in range(len(last))])
    means = {name: np.asarray(item["mean"]).tolist() for name, item in read.meta.stats.items()}
    summary = {"episodes": read.num_episodes, "fps": read.fps, "robot": read.meta.robot_type, "means": means}
    np.savez(out, summary=np.array(json.dumps(summary)), **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
