"""What is in the golden dataset, as formulas: the script that wrote it and the test that reads it share them."""

from __future__ import annotations

import numpy as np

FPS = 10
LENGTHS = (6, 3, 9, 2, 4)
TASKS = ("pick up the café cup", "open the drawer", "pick up the café cup", "open the drawer", "wipe the table")
FRONT, WRIST = (48, 64, 3), (16, 24, 3)
STATE_NAMES, ACTION_NAMES = ["shoulder", "elbow", "gripper"], ["dx", "dy"]


def picture(shape: tuple[int, int, int], episode: int, frame: int) -> np.ndarray:
    """uint8 [h,w,3]: a smooth slope whose direction and brightness say which frame of which episode it is."""
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    slope = rows / shape[0] * (episode + 1) + columns / shape[1] * (5 - episode)
    channels = [20 * slope + 12 * frame, 100 + 10 * slope - 5 * frame, np.full(shape[:2], 40.0 * episode)]
    return np.stack(channels, -1).clip(0, 255).astype(np.uint8)


def numbers(episode: int, frame: int) -> dict[str, np.ndarray]:
    """The columns of one frame that are no pictures."""
    length = LENGTHS[episode]
    return {
        "observation.state": np.array([episode, frame / 7, -frame * 1e-3], np.float32),
        "action": np.array([np.sin(frame), episode - 2], np.float32),
        "next.reward": np.array([frame == length - 1], np.float32),
        "next.done": np.array([frame == length - 1]),
        "calibration": (np.eye(2) * frame + episode / 3).astype(np.float64),
        "ticks": np.array([2**40 + 1000 * episode + frame], np.int64),
    }


def note(episode: int, frame: int) -> str:
    """The text column."""
    return f"frame {frame} of {episode} ✓"
