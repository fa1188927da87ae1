"""Writes ``dataset/`` beside this file, with the real lerobot: run it with the environment of requirements.txt."""

from __future__ import annotations

import shutil
from pathlib import Path

from real import LeRobotDataset
from values import ACTION_NAMES, FPS, FRONT, LENGTHS, STATE_NAMES, TASKS, WRIST, note, numbers, picture

ROOT = Path(__file__).parent / "dataset"
_SIDES = ["height", "width", "channels"]
FEATURES = {
    "observation.images.front": {"dtype": "video", "shape": FRONT, "names": _SIDES},
    "observation.images.wrist": {"dtype": "image", "shape": WRIST, "names": _SIDES},
    "observation.state": {"dtype": "float32", "shape": (3,), "names": STATE_NAMES},
    "action": {"dtype": "float32", "shape": (2,), "names": ACTION_NAMES},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "calibration": {"dtype": "float64", "shape": (2, 2), "names": None},
    "ticks": {"dtype": "int64", "shape": (1,), "names": None},
    "note": {"dtype": "string", "shape": (1,), "names": None},
}


def main() -> None:
    """Five episodes in several data files, video files and folders of them."""
    shutil.rmtree(ROOT, ignore_errors=True)
    made = LeRobotDataset.create("vla-rl/golden", FPS, FEATURES, root=ROOT, robot_type="toy", video_backend="pyav")
    made.meta.update_chunk_settings(chunks_size=2, data_files_size_in_mb=0.004, video_files_size_in_mb=0.0022)
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            pictures = {
                "observation.images.front": picture(FRONT, episode, frame),
                "observation.images.wrist": picture(WRIST, episode, frame),
            }
            words = {"note": note(episode, frame), "task": TASKS[episode]}
            made.add_frame({**numbers(episode, frame), **pictures, **words})
        made.save_episode()
    made.finalize()
    shutil.rmtree(ROOT / "images", ignore_errors=True)


if __name__ == "__main__":
    main()
