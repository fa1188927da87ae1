"""A reward from pictures and instructions: the height in the picture of the object whose colour the instruction names.

It needs no simulator state and no training, so it is the same in a simulator, in an imagined environment and on a
robot.  ``make`` is the lift environment with this reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sims.mujoco.tabletop import COLOURS
from sims.mujoco.tasks.lift import make as make_lift
from vla_rl.contract.env import Array, VecEnv
from vla_rl.contract.policy import State
from vla_rl.rewards.env import RewardWeights, rewarded
from vla_rl.rewards.reward_model import RewardOutput

CAMERA = "front"
MIN_COSINE, MIN_SATURATION = 0.97, 25.0  # of a pixel's hue to the colour's; of 255
RISE, DONE = 0.25, 0.6  # share of the picture's height that is progress 1; progress at which the task is done


class HeightReward:
    """Progress 0 at the object's first visible height, 1 when it is ``RISE`` of the picture higher (``Reward``).

    State: ``start`` float32 [E], the height in the episode's first frame, NaN before it; ``last``, the latest progress,
    which is kept while the object is hidden.
    """

    def initial_state(self, num_envs: int) -> State:
        return {"start": np.full(num_envs, np.nan, np.float32), "last": np.zeros(num_envs, np.float32)}

    def reset_state(self, state: State, env_ids: Array) -> State:
        start, last = state["start"].copy(), state["last"].copy()
        start[env_ids], last[env_ids] = np.nan, 0.0
        return {"start": start, "last": last}

    def evaluate(
        self, frames: Mapping[str, Array], text: Sequence[str], valid: Array, state: State
    ) -> tuple[RewardOutput, State]:
        """See ``Reward``: ``frames`` {camera: uint8 [E,T,h,w,3]}, ``valid`` bool [E,T]."""
        heights = np.stack([height(images, one) for images, one in zip(frames[CAMERA], text, strict=True)])
        start, last = state["start"].copy(), state["last"].copy()
        progress = np.zeros(valid.shape, np.float32)
        for t in range(valid.shape[1]):
            visible = valid[:, t] & np.isfinite(heights[:, t])
            start = np.where(visible & np.isnan(start), heights[:, t], start)
            last = np.where(visible, np.clip((heights[:, t] - start) / RISE, 0.0, 1.0), last).astype(np.float32)
            progress[:, t] = last
        return RewardOutput(progress, progress >= DONE), {"start": start, "last": last}


def height(images: np.ndarray, text: str) -> np.ndarray:
    """float [T]: mean height, 0 at the bottom and 1 at the top, of the pixels of uint8 [T,h,w,3] that have the colour
    named in ``text``; NaN where there are none."""
    named = next(rgba for name, rgba in COLOURS.items() if name in text)
    hue = np.array(named[:3]) - np.mean(named[:3])
    pixels = images.astype(np.float32) - images.mean(-1, keepdims=True)
    size = np.linalg.norm(pixels, axis=-1)
    match = ((pixels @ hue) / (np.linalg.norm(hue) * size + 1e-6) > MIN_COSINE) & (size > MIN_SATURATION)
    rows = 1.0 - (np.arange(images.shape[1]) + 0.5) / images.shape[1]
    count = match.sum((1, 2))
    return np.where(count > 0, (match * rows[:, None]).sum((1, 2)) / np.maximum(count, 1), np.nan)


def make(num_envs: int, **options: Any) -> VecEnv:
    """Lift with a reward for progress and, once, for done, without the simulator's own reward."""
    return rewarded(make_lift(num_envs, **options), HeightReward(), RewardWeights(progress=1.0, done=1.0, env=0.0))
