"""A task: hold the gripper above the cube that the instruction names.

Put this file into ``sims/mujoco/tasks/`` and one line into ``CATALOG`` in ``sims/catalog.py``:

    "reach": "sims.mujoco.tasks.reach_task:make",

``vla-rl inspect reach`` then checks that it keeps the contract, and the whole demo runs in it: in a copy of
``configs/demo.py`` say ``EnvConfig("reach")``.  (In a folder of your own it is ``reach_task:make``, without that line.)
The scene, state, actions and privileged extras are those of lift; a task with a scene of its own implements
``sims.mujoco.task.Task``.  Rules that are functions of ``array_namespace(qpos)``, as here, also run on a GPU:
``vla-rl inspect warp --env.options '{"env": "reach_task:make", "device": "cuda"}'``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.env import MujocoEnv, make_env
from sims.mujoco.scene import GANTRY_QPOS
from sims.mujoco.tabletop import COLOURS, HOLD_STEPS, MOST_DISPLACEMENT
from sims.mujoco.task import Constant, TaskResult, TaskState, pick
from sims.mujoco.tasks.lift import LiftTask
from vla_rl.contract.env import Array, Observation
from vla_rl.contract.task import declare_task

HOVER = Constant([0.0, 0.0, 0.08])  # metres from a cube's centre to the goal of the pinch point
NEAR = 0.015  # metres


class ReachTask(LiftTask):
    """Success: the pinch point within ``NEAR`` of its goal above the named cube, in one control step.

    TaskState ``held`` is ``HOLD_STEPS`` for cubes that the pinch point is above, so ``privileged/lifted`` names those.
    """

    name = "reach"
    failures = ()
    time_limit = 30

    def __init__(self, cubes: int = 4, colours: int = 4, instruct: Any = "target") -> None:
        super().__init__(cubes, colours, instruct)
        self.texts = tuple(f"reach for the {name} cube" for name in list(COLOURS)[:colours])

    def evaluate(self, qpos: Array, task_state: TaskState) -> TaskResult:
        xp = array_namespace(qpos)  # numpy, or torch
        goals = self.centres(qpos) + HOVER.beside(qpos)
        reached = xp.linalg.vector_norm(goals - qpos[:, None, GANTRY_QPOS], axis=-1) < NEAR
        success = pick(reached, task_state["named"])
        held = xp.astype(reached, xp.int16) * HOLD_STEPS
        return self.result(task_state, success, [], held=held)  # nothing fails


class ReachExpert:
    """Moves straight to the goal; recording demonstrations needs ``horizon`` 1 only."""

    def __init__(self, horizon: int = 1) -> None:
        self._horizon = horizon

    def act(self, obs: Observation) -> np.ndarray:
        """float32 [E,H,4]: towards the goal above the named cube, the gripper open."""
        goal = obs.extras["privileged/target"] + HOVER.value
        left = goal - obs.state[:, 4:7]  # from the target position of the gantry
        move = np.clip(left, -MOST_DISPLACEMENT, MOST_DISPLACEMENT)
        action = np.column_stack([move, np.full(len(move), -1.0)]).astype(np.float32)
        return np.repeat(action[:, None], self._horizon, axis=1)


@declare_task(expert=ReachExpert, swapped_options={"instruct": "distractor"})
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The reach environment.  Options: ``cubes``, ``colours``, ``instruct``, and those of ``MujocoEnv``."""
    return make_env(ReachTask, num_envs, options)
