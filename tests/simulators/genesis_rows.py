"""``python genesis_rows.py`` in Genesis' installation: what one environment does to its neighbours, as JSON.

Environments 0 and 2 play the same episodes each time.  "alone" says of every way to make environment 1 diverge in
earnest how it ended and whether the others were bit for bit as without it; "pinch" is the largest distance, in metres,
between where the arm was sent and where it came to rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from sims.genesis import CUBES, GenesisEnv, make_in_process
from sims.mujoco.tasks.lift import LiftExpert

STEPS, AT = 16, 4
NAN, INFINITY = float("nan"), float("inf")
WRONGS: dict[str, Callable[[GenesisEnv], None]] = {
    "a velocity that is no number": lambda env: env._rows.vel[1].fill_(NAN),
    "a cube at infinity": lambda env: env._rows.qpos[1, CUBES : CUBES + 3].fill_(INFINITY),
    "an arm at 1e12 rad/s": lambda env: env._rows.vel[1, :7].fill_(1e12),
    "a cube at 1e30 m/s": lambda env: env._rows.vel[1, CUBES : CUBES + 3].fill_(1e30),
}


def play(env: GenesisEnv, wrong: Callable[[GenesisEnv], None] | None = None) -> tuple[np.ndarray, str]:
    """Joints of environments 0 and 2 after every step [T,2,q], and how environment 1 ended."""
    expert, seen = LiftExpert(1), []
    obs = env.reset([0, 1, 2], [0, 1, 2])
    for number in range(STEPS):
        if wrong is not None and number == AT:
            wrong(env)
        step = env.step(expert.act(obs))
        obs = step.obs
        assert np.isfinite(obs.state).all()
        seen.append(env.snapshot([0, 2])["rows/qpos"])
    return np.stack(seen), step.cause[1]


def reached(env: GenesisEnv) -> float:
    """How far the arm ends from where it is sent, at three places."""
    env.reset([0, 1, 2], [0, 1, 2])
    upwards = np.repeat(np.array([[[0.01, 0.01, 0.02, -1.0]]] * 3), 3, axis=1)
    state = [env.step(chunk).obs.state for chunk in (upwards, 0 * upwards, 0 * upwards, 0 * upwards)][-1]
    return float(np.abs(state[:, :3] - state[:, 4:7]).max())


if __name__ == "__main__":
    made = make_in_process(3, cameras=[])
    plain, cause = play(made)
    alone = {}
    for name, wrong in WRONGS.items():
        others, ended = play(made, wrong)
        alone[name] = [ended, np.array_equal(others, plain)]
    print(json.dumps({"undisturbed": cause, "alone": alone, "pinch": reached(made)}))
