"""Random pictures of the tabletop's tasks with the positions that their instructions name, for grounding pretraining.

These are the simulator's own labels: whoever trains with them should say so beside the number of demonstrations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from sims.mujoco.generators import Generators
from sims.mujoco.render import Scenes, labelled
from sims.mujoco.scene import (
    CUBE_EDGE,
    CUBES_QPOS,
    FINGER_OPEN,
    FINGER_QPOS,
    GANTRY_QPOS,
    WORKSPACE_HIGH,
    WORKSPACE_LOW,
)
from sims.mujoco.tabletop import SPACING, UNSEEN, Tabletop
from sims.mujoco.tasks.lift import LiftTask
from sims.mujoco.tasks.mixed import MixedTask
from sims.mujoco.tasks.place import PlaceTask
from sims.mujoco.tasks.push import PushTask

_ELSEWHERE, _OVER_A_CUBE, _HOLDING = 0, 1, 2
_SHARES = (0.45, 0.35, 0.20)  # of the pictures, by the pose of the gripper
_TOUCHING = 0.3  # share of the pictures in which closed fingers stand beside a cube, as in a push; not in lift


def lift(count: int, seed: int, size: int = 64, camera: str = "front", cubes: int = 3, colours: int = 4) -> Scenes:
    """``count`` pictures of lift: the gripper anywhere above the cubes, low around one of them, or holding one."""
    task, rng = LiftTask(cubes, colours), np.random.Generator(np.random.PCG64(seed))
    one = Generators([rng])
    qpos, ctrl = np.zeros((count, task.model.nq)), np.zeros((count, task.model.nu))
    for i in range(count):
        qpos[i] = task.place_cubes(task.robot.scatter(cubes, SPACING, one), one)
        _place_gripper(qpos[i], ctrl[i], np.arange(cubes), rng)
    colour = rng.permuted(np.tile(np.arange(colours, dtype=np.int8), (count, 1)), axis=1)[:, :cubes]
    named = rng.integers(cubes, size=count).astype(np.int8)
    centres = task.centres(qpos)[np.arange(count), named][:, None]
    return labelled(task, qpos, ctrl, {"colour": colour, "named": named}, centres, size, camera)


def _of_episodes(kind: Callable[[], Tabletop], count: int, seed: int, size: int = 64, camera: str = "front") -> Scenes:
    """``count`` episodes of a task, with the gripper at a random pose; ``uv`` holds the cube, then its goal."""
    task = kind()
    rng = np.random.Generator(np.random.PCG64(seed))
    episodes = task.blank_episodes(count)
    qpos, ctrl, task_state = episodes.qpos, episodes.ctrl, episodes.task_state
    for row in range(count):
        episodes[[row]] = task.sample_episodes(Generators([rng]))
        present = np.flatnonzero(task_state["colour"][row] != UNSEEN)
        if rng.random() < _TOUCHING:
            _stand_beside(task, qpos[row], ctrl[row], int(rng.choice(present)), rng)
        else:
            _place_gripper(qpos[row], ctrl[row], present, rng)
    extras = task.observe_extras(qpos, task_state)
    named = np.stack([extras["privileged/target"], extras["privileged/goal"]], axis=1).astype(np.float64)
    return labelled(task, qpos, ctrl, task_state, named, size, camera)


place, push, mixed = (partial(_of_episodes, kind) for kind in (PlaceTask, PushTask, MixedTask))


def _place_gripper(qpos: np.ndarray, ctrl: np.ndarray, cubes: np.ndarray, rng: np.random.Generator) -> None:
    """Put the gripper elsewhere, over one of ``cubes`` (int [n]) or holding it: into ``qpos`` [nq], ``ctrl`` [nu]."""
    gripper_pose = rng.choice(3, p=_SHARES)
    start = CUBES_QPOS + 7 * cubes[rng.integers(len(cubes))]
    pinch, finger = rng.uniform(WORKSPACE_LOW, WORKSPACE_HIGH), rng.uniform(0, FINGER_OPEN)
    if gripper_pose == _ELSEWHERE:
        pinch[2] = rng.uniform(0.05, WORKSPACE_HIGH[2])  # above the cubes, or fingers would be inside them
    elif gripper_pose == _OVER_A_CUBE:
        pinch = np.array([*(qpos[start : start + 2] + rng.normal(0, 0.006, 2)), rng.uniform(0.016, 0.10)])
        finger = FINGER_OPEN
    else:
        pinch[2], finger = rng.uniform(CUBE_EDGE / 2, 0.15), CUBE_EDGE / 2
        if pinch[2] < 0.06:  # lower than this, another position could be inside a neighbour
            pinch[:2] = qpos[start : start + 2]
        qpos[start : start + 7] = [*pinch, 1.0, 0.0, 0.0, 0.0]
    qpos[GANTRY_QPOS], qpos[FINGER_QPOS] = pinch, finger
    ctrl[:3] = np.clip(pinch + rng.uniform(-0.003, 0.003, 3), WORKSPACE_LOW, WORKSPACE_HIGH)
    ctrl[3] = 0.0 if gripper_pose == _HOLDING else FINGER_OPEN


def _stand_beside(task: Tabletop, qpos: np.ndarray, ctrl: np.ndarray, cube: int, rng: np.random.Generator) -> None:
    """Closed fingers, low, 2 to 6 cm from the centre of ``cube``."""
    angle, away = rng.uniform(0, 2 * np.pi), rng.uniform(0.026, 0.06)
    centre = task.cubes(qpos[None])[0, cube, :2]
    pinch = np.array([*(centre + away * np.array([np.cos(angle), np.sin(angle)])), rng.uniform(0.016, 0.07)])
    pinch = np.clip(pinch, WORKSPACE_LOW, WORKSPACE_HIGH)
    qpos[GANTRY_QPOS], qpos[FINGER_QPOS] = pinch, rng.choice([0.0, FINGER_OPEN], p=[0.8, 0.2])
    ctrl[:3], ctrl[3] = pinch, 0.0
