"""Lift as anyone would write it for Gymnasium: one episode per environment, plain numpy, MuJoCo's own bindings."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from sims.mujoco.generators import Generators
from sims.mujoco.scene import CUBES_QPOS, FINGER_OPEN, WORKSPACE_HIGH, WORKSPACE_LOW
from sims.mujoco.tabletop import HOLD_STEPS, LIFT_HEIGHT
from sims.mujoco.tasks.lift import LiftTask

STATE, SUBSTEPS = 8, LiftTask().substeps
OPPONENT = "AsyncVectorEnv(shared memory, no copies) of SyncVectorEnv of plain gymnasium.Env with mujoco.mj_step"
_BOUND = np.array([0.03, 0.03, 0.03, 1.0], np.float32)


class GymnasiumLift(gymnasium.Env[np.ndarray, np.ndarray]):
    """One episode of lift: its own ``MjData``, one ``mujoco.mj_step`` of all substeps per control step.

    The rules, the state and the time limit are those of ``sims.mujoco.tasks.lift``, written for one environment; only
    the drawing of an episode is borrowed from there, so that both simulate the same.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (STATE,), np.float32)
    action_space = gymnasium.spaces.Box(-_BOUND, _BOUND, dtype=np.float32)

    def __init__(self, task: LiftTask) -> None:
        """The environments of a process may share the ``task``, which draws episodes."""
        self._model, self._task = (model := task.model), task
        self._data = data = mujoco.MjData(model)
        self._ctrl, self._gantry, self._fingers = data.ctrl, data.qpos[:3], data.qpos[3:5]
        self._heights = data.qpos[CUBES_QPOS + 2 :: 7]
        self._target, self._held = np.zeros(3), np.zeros(len(self._heights), np.int16)
        self._named, self._time = 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The episode of ``seed``."""
        episode = self._task.sample_episodes(Generators([np.random.Generator(np.random.PCG64(seed or 0))]))
        mujoco.mj_resetData(self._model, self._data)
        self._data.qpos[:], self._ctrl[:] = episode.qpos[0], episode.ctrl[0]
        self._target[:] = episode.ctrl[0, :3]
        self._named, self._time = int(episode.task_state["named"][0]), 0
        self._held[:] = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One control step with ``action`` [4]: displacement in metres and grip sign."""
        action = np.minimum(np.maximum(action, -_BOUND), _BOUND)
        target = np.minimum(np.maximum(self._target + action[:3], WORKSPACE_LOW), WORKSPACE_HIGH)
        self._target = self._ctrl[:3] = target
        self._ctrl[3] = 0.0 if action[3] > 0 else FINGER_OPEN
        mujoco.mj_step(self._model, self._data, nstep=SUBSTEPS)
        self._time += 1
        self._held = (self._held + 1) * (self._heights >= LIFT_HEIGHT)
        done = self._held >= HOLD_STEPS
        success = bool(done[self._named])
        terminated = success or bool(done.any())
        truncated = self._time >= LiftTask.time_limit and not terminated
        return self._observe(), float(success), terminated, truncated, {}

    def _observe(self) -> np.ndarray:
        state = np.empty(STATE, np.float32)
        state[:3], state[3] = self._gantry, self._fingers.sum()
        state[4:7], state[7] = self._ctrl[:3], 2 * self._ctrl[3]
        return state

    def physics(self) -> np.ndarray:
        """``qpos`` and ``qvel``, to check that both sides simulate the same."""
        return np.concatenate([self._data.qpos, self._data.qvel])


class Share(gymnasium.Env[np.ndarray, np.ndarray]):
    """The environment of one worker process: ``num_envs`` plain environments in a ``SyncVectorEnv``.

    ``AsyncVectorEnv`` takes environments with one reward and one end each, so those of the environments are three more
    columns of the observation [num_envs, STATE + 3], which is in shared memory.
    """

    def __init__(self, num_envs: int) -> None:
        make = partial(GymnasiumLift, LiftTask())
        self._envs = SyncVectorEnv([make] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self.action_space = self._envs.action_space
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (num_envs, STATE + 3), np.float32)
        self._columns = np.zeros((num_envs, STATE + 3), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Environment ``i`` plays the episode of ``seed + i``."""
        self._columns[:, :STATE], _ = self._envs.reset(seed=seed)
        self._columns[:, STATE:] = 0
        return self._columns, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One control step of all environments with ``action`` [num_envs, 4]; no episode ends in the benchmark."""
        columns = self._columns
        columns[:, :STATE], columns[:, STATE], columns[:, STATE + 1], columns[:, STATE + 2], _ = self._envs.step(action)
        return columns, 0.0, False, False, {}

    def physics(self) -> np.ndarray:
        """``qpos`` and ``qvel`` of all environments."""
        return np.stack([env.physics() for env in self._envs.envs])


def vector(num_envs: int, workers: int) -> AsyncVectorEnv:
    """``num_envs`` episodes over ``workers`` processes."""
    return AsyncVectorEnv(
        [partial(Share, num_envs // workers)] * workers, shared_memory=True, copy=False, context="spawn"
    )
