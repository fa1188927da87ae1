"""An environment with a simulator of its own: a ball on a rail that must be brought to a mark and stopped there.

Everything a learner may assume is in the spec; the physics is numpy over all environments at once.  ``EpisodeTracker``
checks the arguments of callers and keeps seeds, clocks and ends of episodes.  ``BallExpert`` makes demonstrations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vla_rl.contract.env import ArraySpec, EnvSpec, Observation, Observe, Step
from vla_rl.contract.task import declare_task
from vla_rl.contract.tracker import SUCCESS, TIME_LIMIT, EpisodeTracker

DT, LIMIT = 0.05, 60  # seconds per control step; control steps per episode
NEAR, SLOW = 0.05, 0.2  # metres and metres per second: the ball is at the mark and at rest
SIZE = 32  # pixels

SPEC = EnvSpec(
    name="ball",
    images={"side": ArraySpec((SIZE, SIZE, 3), "uint8", 0, 255, unit="RGB", frame="side")},
    state=ArraySpec((2,), "float32", (-1.0, -4.0), (1.0, 4.0), unit="m, m/s", frame="rail", names=("x", "speed")),
    action=ArraySpec((1,), "float32", -4.0, 4.0, unit="m/s^2", frame="rail", names=("push",)),
    tasks=("stop the ball at the mark",),
    control_dt=DT,
    time_limit=LIMIT,
    max_chunk=10,
    extras={"privileged/mark": ArraySpec((1,), "float32", -0.8, 0.8, unit="m", frame="rail")},
)


class BallEnv:
    """``E`` rails (``VecEnv``).  A policy sees the mark in the picture only; the state is that of the ball."""

    def __init__(self, num_envs: int) -> None:
        self.spec, self._book = SPEC, EpisodeTracker(num_envs)
        self._x, self._speed, self._mark = (np.zeros(num_envs, np.float32) for _ in range(3))

    @property
    def num_envs(self) -> int:
        return self._book.num_envs

    def reset(self, env_ids: Any, seeds: Any) -> Observation:
        """New episodes in ``env_ids`` (int [R]); all of an episode follows from its seed and the actions."""
        index = self._book.index(env_ids)
        seed = self._book.seeds(index, seeds)
        self._book.begin(index, seed)
        for env_id, one in zip(index, seed, strict=True):
            rng = np.random.default_rng(one)
            self._x[env_id], self._mark[env_id] = rng.uniform(-0.8, 0.8, 2)
            self._speed[env_id] = 0.0
        return self._observe()

    def step(self, chunk: Any, observe: Observe = "last") -> Step:
        """Execute ``chunk`` [E,H,1]; the end of an episode inside a chunk leaves the rest of it unexecuted."""
        return self._book.execute(chunk, self.spec, observe, self._advance, self._observe)

    def _advance(self, active: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One control step of the environments that run: rewards, successes, causes of ends (0: still running)."""
        self._speed[active] = np.clip(self._speed[active] + DT * action[:, 0], -4.0, 4.0)
        self._x[active] = np.clip(self._x[active] + DT * self._speed[active], -1.0, 1.0)
        self._speed[active] = np.where(np.abs(self._x[active]) == 1.0, 0.0, self._speed[active])
        at_mark = np.abs(self._x[active] - self._mark[active]) < NEAR
        success = at_mark & (np.abs(self._speed[active]) < SLOW)
        late = self._book.time[active] >= LIMIT
        return success.astype(np.float32), success, np.select([success, late], [SUCCESS, TIME_LIMIT], 0)

    def _observe(self) -> Observation:
        """Copies: what was handed out must not change with the next step."""
        side = np.full((self.num_envs, SIZE, SIZE, 3), 230, np.uint8)
        red, blue = (200, 40, 40), (40, 40, 200)
        for place, rows, colour in ((self._mark, slice(24, 30), red), (self._x, slice(14, 22), blue)):
            column = np.rint((place + 1) / 2 * (SIZE - 3)).astype(int)[:, None] + np.arange(3)
            side[np.arange(self.num_envs)[:, None], rows, column] = colour
        state, task = np.stack([self._x, self._speed], 1), np.zeros(self.num_envs, np.int64)
        mark = self._mark[:, None].copy()
        return Observation({"side": side}, state, task, self._book.time.copy(), {"privileged/mark": mark})

    def close(self) -> None:
        """Nothing to free."""


class BallExpert:
    """A spring and a damper towards the mark; it may read what is privileged, policies may not."""

    def __init__(self, horizon: int = 1) -> None:
        self._horizon = horizon

    def act(self, obs: Observation) -> np.ndarray:
        """float32 [E,H,1]."""
        push = 12.0 * (obs.extras["privileged/mark"] - obs.state[:, :1]) - 6.0 * obs.state[:, 1:]
        return np.repeat(np.clip(push, -4.0, 4.0)[:, None], self._horizon, axis=1).astype(np.float32)


@declare_task(expert=BallExpert, spec=lambda: SPEC)
def make(num_envs: int) -> BallEnv:
    """What ``--env ball_env:make`` names; what belongs to its task is declared above it."""
    return BallEnv(num_envs)
