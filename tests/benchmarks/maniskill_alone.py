"""Runs where ManiSkill is: ``python maniskill_alone.py state|rgb EPISODES`` prints median seconds of an episode.

It imports no other file of the tests, which an installation does not have.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import gymnasium
import numpy as np
import torch

from sims.maniskill.make import make_in_process

TASK, SIZE, STEPS = "PushCube-v1", 64, 50


def main(obs: str, episodes: int) -> dict[str, float]:
    """Seconds of one episode of each side, and its steps."""
    torch.set_num_threads(1)
    ours = make_in_process(1, TASK, obs=obs, image_size=SIZE, ends_at_success=False)
    pictures = {"sensor_configs": {"width": SIZE, "height": SIZE}} if obs == "rgb" else {}
    backends = {"sim_backend": "physx_cpu", "render_backend": "cpu"}
    mode = "state" if obs == "state" else "rgb+state"
    alone = gymnasium.make(TASK, num_envs=1, obs_mode=mode, **backends, **pictures)
    unit = np.random.default_rng(0).uniform(-1, 1, (STEPS, ours.spec.action_dim)).astype(np.float32)
    low, high = np.float32(ours.spec.action.low), np.float32(ours.spec.action.high)
    physical = low + (unit + 1) / 2 * (high - low)

    def play_ours(seed: int) -> None:
        ours.reset([0], [seed])
        for action in physical:
            ours.step(action[None, None])

    def play_alone(seed: int) -> None:
        alone.reset(seed=seed)
        for action in unit:
            alone.step(action[None])

    sides: dict[str, Callable[[int], None]] = {"ours": play_ours, "alone": play_alone}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for seed in range(episodes + 1):
        for name, play in sides.items():
            start = time.perf_counter()
            play(seed)
            if seed:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {"steps": STEPS, **{name: median(values) for name, values in seconds.items()}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
