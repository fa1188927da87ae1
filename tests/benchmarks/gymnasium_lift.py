"""Lift as a Gymnasium environment: what one worker process of ``AsyncVectorEnv`` runs, as fast as plain MuJoCo goes."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import mujoco
import numpy as np

from sims.mujoco.tasks.lift import LiftTask

STATE = 8  # entries of lift's state; the columns after it are reward, success, failure and out of time
COLUMNS = STATE + 4


class GymnasiumLift(gymnasium.Env[np.ndarray, np.ndarray]):
    """``rows`` episodes, each in its own ``MjData``, stepped one after the other with ``mujoco.mj_step``.

    Control and judging are the task's own, on all rows at once.  Gymnasium allows one reward and one end per
    environment, so those of the rows travel as columns of the observation, which is in shared memory.  An episode that
    ended is not reset: the benchmark stops before any does.
    """

    def __init__(self, rows: int) -> None:
        self._task = task = LiftTask()
        self._data = [mujoco.MjData(task.model) for _ in range(rows)]
        self._views = [(data, data.ctrl, data.qpos) for data in self._data]
        self._ctrl, self._qpos = np.zeros((rows, task.model.nu)), np.zeros((rows, task.model.nq))
        self._memory = {name: np.stack([value] * rows) for name, value in task.memory.items()}
        self._time = 0
        self._low, self._high = (np.asarray(bound, np.float32) for bound in (task.action.low, task.action.high))
        bounds = (np.tile(bound, (rows, 1)) for bound in (self._low, self._high))
        self.action_space = gymnasium.spaces.Box(*bounds, dtype=np.float32)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (rows, COLUMNS), np.float32)
        self._observation = np.zeros((rows, COLUMNS), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Row ``i`` starts the episode of ``seed + i``."""
        for row, (data, ctrl, qpos) in enumerate(self._views):
            episode = self._task.begin(np.random.Generator(np.random.PCG64((seed or 0) + row)))
            mujoco.mj_resetData(self._task.model, data)
            qpos[:], ctrl[:] = episode.qpos, episode.ctrl
            self._qpos[row], self._ctrl[row] = episode.qpos, episode.ctrl
            for name, item in episode.memory.items():
                self._memory[name][row] = item
        self._time = 0
        self._observation[:, :STATE] = self._task.proprioception(self._qpos, self._ctrl)
        self._observation[:, STATE:] = 0
        return self._observation, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One control step of all rows with ``action`` [rows, 4]."""
        task = self._task
        self._ctrl = task.control(self._ctrl, np.clip(action, self._low, self._high))
        for row, (data, ctrl, qpos) in enumerate(self._views):
            ctrl[:] = self._ctrl[row]
            mujoco.mj_step(task.model, data, nstep=task.substeps)
            self._qpos[row] = qpos
        self._time += 1
        verdict = task.judge(self._qpos, self._memory)
        self._memory = verdict.memory
        seen = self._observation
        seen[:, :STATE] = task.proprioception(self._qpos, self._ctrl)
        seen[:, STATE], seen[:, STATE + 1] = verdict.reward, verdict.success
        seen[:, STATE + 2], seen[:, STATE + 3] = verdict.failure >= 0, self._time >= task.time_limit
        return seen, 0.0, False, False, {}


def vector(rows: int, workers: int) -> gymnasium.vector.AsyncVectorEnv:
    """``rows`` episodes over ``workers`` processes, with everything chosen for speed."""
    make = partial(GymnasiumLift, rows // workers)
    return gymnasium.vector.AsyncVectorEnv([make] * workers, shared_memory=True, copy=False, context="spawn")
