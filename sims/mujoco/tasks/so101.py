"""so101: "pick up the red cube" with an arm like the SO-101, commanded by joint positions.

An action is the absolute targets of the six joints in radians, the gripper as an opening from 0 (closed) to 1; the
state is their measured positions in the same order, under LeRobot's names ("shoulder_pan.pos", ...).

Success and failure are those of lift (``sims/mujoco/tasks/lift.py``), within ``seconds``: the named cube's centre at
least 6 cm above the table at the end of 5 control steps in a row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from sims.mujoco import so101 as arm
from sims.mujoco.env import MujocoEnv, make_env, make_spec, parameters
from sims.mujoco.render import Scenes, labelled
from sims.mujoco.so101 import ROLL, So101
from sims.mujoco.tabletop import Instruct
from sims.mujoco.tasks.lift import LiftTask, lift_potential
from vla_rl.contract.env import Observation, on_host
from vla_rl.contract.errors import UserError
from vla_rl.contract.task import declare_task

_OPTIONS = ("control_hz", "cubes", "colours", "instruct", "deadline", "seconds")
STRIDE = 0.04  # radians per control step, of the joint that moves most
OPEN, CLOSED = 0.6, 0.1  # commanded openings
CLEARANCE = 0.010  # metres from the fixed jaw to a cube's face, before the moving jaw closes
TRAVEL_HEIGHT, GRASP_HEIGHT, HOLD_HEIGHT = 0.085, 0.018, 0.10  # metres of the pinch point
RISE = 0.03  # metres above the pinch point that a held cube is carried towards
NEAR = 0.008  # metres beside the place to grasp within which the gripper may descend
_BETWEEN = 0.022  # metres from the pinch point within which a cube is between the jaws
_HELD = (0.18, 0.30)  # openings between which there is a cube in the gripper
_CLOSING = 0.1  # opening per control step by which the jaws close
# Of the random pictures: shares in which the gripper holds a cube, and is close to one; its opening when it holds one.
_HOLDING, _AROUND, _HOLDING_OPENING = 0.3, 0.4, 0.25


class So101Lift(LiftTask):
    """The rules of lift for one red cube, or for more of several colours."""

    name = "so101"
    fewest = (1, 1)

    def __init__(
        self,
        control_hz: int = 25,
        cubes: int = 1,
        colours: int = 1,
        instruct: Instruct = "target",
        deadline: int | None = None,
        seconds: int = 6,
    ) -> None:
        """``seconds``: the longest episode; raises UserError for none."""
        if seconds < 1:
            raise UserError(f"seconds={seconds} leaves no time to pick anything up; give at least 1.")
        super().__init__(cubes, colours, instruct, deadline, robot=So101(control_hz))
        self.time_limit = seconds * control_hz


class So101Expert:
    """A scripted expert, without state: an action follows from the observation alone.

    It moves above the named cube, descends beside it, closes, lifts and holds.
    """

    def __init__(self, horizon: int = 1) -> None:
        self._horizon = horizon

    def act(self, obs: Observation) -> np.ndarray:
        """The next actions, float32 [E,H,6], the later ones from predicted joints and cubes."""
        joints = on_host(obs.state).astype(np.float64)
        cube = on_host(obs.extras["privileged/target"]).astype(np.float64)
        actions = np.empty((len(joints), self._horizon, 6), np.float32)
        for i in range(self._horizon):
            actions[:, i] = action = _next(joints, cube)
            cube = cube + np.where(_holds(joints, cube), 1.0, 0.0)[:, None] * (
                arm.pinch_point(action) - arm.pinch_point(joints)
            )
            joints = _predicted(joints, action, cube)
        return actions


def _next(joints: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """Targets [E,6] of one control step from ``joints`` [E,6] and the named ``cube`` [E,3]."""
    pinch, holding = arm.pinch_point(joints), _holds(joints, cube)
    angle = np.arctan2(cube[:, 1], cube[:, 0] - arm.LINKS[0].position[0])
    beside = cube[:, :2] - CLEARANCE * np.stack([-np.sin(angle), np.cos(angle)], axis=1)
    away = np.linalg.norm(beside - pinch[:, :2], axis=1)
    centred = np.linalg.norm(cube[:, :2] - pinch[:, :2], axis=1) < CLEARANCE + NEAR
    grip = holding | (centred & (pinch[:, 2] < GRASP_HEIGHT + 0.006))
    # The larger the distance, the higher the gripper stays: a funnel, so that the height is a function of the position.
    height = np.clip(GRASP_HEIGHT + (away - NEAR) * 3.0, GRASP_HEIGHT, TRAVEL_HEIGHT)
    goal = np.column_stack([beside, height])
    goal[holding] = np.column_stack([pinch[:, :2], np.minimum(pinch[:, 2] + RISE, HOLD_HEIGHT)])[holding]
    wanted = arm.solve(goal, ROLL)
    stay = grip & ~holding  # until the jaws have closed
    wanted[stay] = joints[stay, :5]
    left = wanted - joints[:, :5]
    moved = joints[:, :5] + left * np.minimum(1.0, STRIDE / np.maximum(np.abs(left).max(1), 1e-9))[:, None]
    return np.column_stack([moved, np.where(grip, CLOSED, OPEN)])


def _predicted(joints: np.ndarray, action: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """[E,6]: the arm reaches its targets in a control step; the jaws take several and stop at a cube."""
    opening = np.clip(action[:, 5], joints[:, 5] - _CLOSING, joints[:, 5] + _CLOSING)
    between = np.linalg.norm(cube - arm.pinch_point(joints), axis=1) < _BETWEEN
    return np.column_stack([action[:, :5], np.where(between, np.maximum(opening, np.mean(_HELD)), opening)])


def _holds(joints: np.ndarray, cube: np.ndarray) -> np.ndarray:
    """bool [E]: the jaws have closed on the cube."""
    near = np.linalg.norm(cube - arm.pinch_point(joints), axis=1) < _BETWEEN
    return np.asarray(near & (joints[:, 5] > _HELD[0]) & (joints[:, 5] < _HELD[1]))


def potential(obs: Observation) -> np.ndarray:
    """As that of lift: half for the gripper at the named cube, half for the height of that cube."""
    return lift_potential(arm.pinch_point(np.asarray(obs.state, np.float64)), obs)


def scenes(count: int, seed: int, size: int = 64, camera: str = "front", cubes: int = 1, colours: int = 1) -> Scenes:
    """``count`` random pictures (``scenes.py``): the gripper anywhere above the cubes, close to one, or holding one."""
    task, rng = So101Lift(cubes=cubes, colours=colours), np.random.Generator(np.random.PCG64(seed))
    episodes = [task.sample_episode(rng) for _ in range(count)]
    qpos, ctrl = (np.stack([getattr(episode, name) for episode in episodes]) for name in ("qpos", "ctrl"))
    task_state = {name: np.stack([episode.task_state[name] for episode in episodes]) for name in task.task_state}
    share, chosen, rows = rng.random(count), rng.integers(cubes, size=count), np.arange(count)
    held, around = share < _HOLDING, (share >= _HOLDING) & (share < _HOLDING + _AROUND)
    close = task.centres(qpos)[rows, chosen] + rng.uniform([-0.02, -0.02, 0.0], [0.02, 0.02, 0.06], (count, 3))
    qpos[around, :5] = arm.solve(close[around], ROLL)
    qpos[held, 5] = arm.closing_angle(_HOLDING_OPENING)
    places = qpos[:, task.robot.first_cube :].reshape(count, cubes, 7)
    places[rows[held], chosen[held], :3] = arm.pinch_point(qpos[held])
    ctrl[:, :6] = qpos[:, :6]
    named = task.centres(qpos)[rows, task_state["named"]][:, None]
    return labelled(task, qpos, ctrl, task_state, named, size, camera)


@declare_task(
    expert=So101Expert,
    scenes="sims.mujoco.tasks.so101:scenes",
    progress=potential,
    spec=partial(make_spec, So101Lift, _OPTIONS),
    parameters=parameters,
)
def make(num_envs: int, **options: Any) -> MujocoEnv:
    """The SO-101 environment.

    Options of the task: ``control_hz`` 20, 25, 40 or 50 (25), ``cubes`` 1-4 (1), ``colours`` at least as many and at
    most 6 (1), ``instruct`` "target" or "distractor", ``deadline`` control steps after which an unfinished episode has
    failed (none), ``seconds`` of the longest episode (6).  Cameras are "front" and "wrist"; the rest: see ``make_env``.
    """
    return make_env(So101Lift, _OPTIONS, num_envs, options)
