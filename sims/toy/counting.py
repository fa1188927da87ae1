"""The auditing environment: data that are lost, doubled or reordered on the way to a learner are detected.

An observation holds its episode's seed, the number of steps so far and the episode's length; every reward is the number
of its step.  A receiver can recompute all of them with :func:`episode_length` and :func:`expected_reward`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sims.base import NumpyEnv
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.task import declare_task

_SEED_MODULUS = 1 << 20
_LONGEST = 29
_SIZE = 4  # pixels


def episode_length(seed: np.ndarray) -> np.ndarray:
    """int64: low-level actions in the episode of ``seed``, 3 to 29, mostly not a multiple of a chunk."""
    mixed: np.ndarray = (np.asarray(seed, np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return 3 + (mixed % np.uint64(_LONGEST - 2)).astype(np.int64)


def expected_reward(steps: np.ndarray) -> np.ndarray:
    """float32: the reward of the action with which the episode has ``steps`` actions."""
    return np.asarray(steps, np.float32)


class CountingEnv(NumpyEnv):
    """Counts actions.  Odd seeds end by truncation, even ones by termination with success.

    state   float32 [E,4]  seed modulo 2^20, steps, episode length, sum of the first action entry since the reset
    image   uint8 [E,4,4,3]  red: steps, green: seed modulo 256, blue: seed // 256 modulo 256
    action  float32 [E,H,2]  free; meant for echoing (steps, seed modulo 2^20), which the bounds allow
    """

    def __init__(self, num_envs: int) -> None:
        super().__init__(spec(), num_envs, {"echo": np.zeros(num_envs, np.float64)})

    def _begin(self, env_id: int, seed: int) -> None:
        self._task_state["echo"][env_id] = 0.0

    def _advance(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._task_state["echo"][env_ids] += action[:, 0]
        over = self._time[env_ids] >= episode_length(self._seed[env_ids])
        even = self._seed[env_ids] % 2 == 0
        return expected_reward(self._time[env_ids]), over & even, over & ~even

    def _state(self) -> np.ndarray:
        seed = np.maximum(self._seed, 0)
        columns = [seed % _SEED_MODULUS, self._time, episode_length(seed), self._task_state["echo"]]
        return np.stack(columns, axis=1).astype(np.float32)

    def _images(self) -> Mapping[str, np.ndarray]:
        seed = np.maximum(self._seed, 0)
        pixel = np.stack([self._time, seed, seed >> 8], axis=1).astype(np.uint8)
        return {"audit": np.tile(pixel[:, None, None], (1, _SIZE, _SIZE, 1))}

    def _instruction(self) -> np.ndarray:
        return np.maximum(self._seed, 0) % 2


def spec() -> EnvSpec:
    """The spec of :func:`make`."""
    images = {"audit": ArraySpec((_SIZE, _SIZE, 3), "uint8", 0, 255, unit="count", frame="audit")}
    names = ("seed", "steps", "length", "echo")
    most = float(_SEED_MODULUS)
    return EnvSpec(
        name="counting",
        images=images,
        state=ArraySpec((4,), "float32", (0.0, 0.0, 0.0, -most), (most, 64.0, 64.0, most), "count", names=names),
        action=ArraySpec((2,), "float32", (-64.0, 0.0), (64.0, most), unit="count", names=("steps", "seed")),
        tasks=("count the even episode", "count the odd episode"),
        control_dt=0.1,
        time_limit=_LONGEST,
        max_chunk=8,
        can_snapshot=True,
    )


@declare_task(spec=spec)
def make(num_envs: int) -> CountingEnv:
    """The counting environment; it has no options."""
    return CountingEnv(num_envs)
