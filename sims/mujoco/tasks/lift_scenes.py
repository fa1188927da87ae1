"""Random pictures of the lift scene with the position of the named cube, for grounding pretraining.

These are the simulator's own labels: whoever trains with them should say so beside the number of demonstrations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sims.mujoco.render import Renderer, project
from sims.mujoco.scene import (
    CUBE_EDGE,
    CUBES_QPOS,
    FINGER_OPEN,
    FINGER_QPOS,
    GANTRY_QPOS,
    WORKSPACE_HIGH,
    WORKSPACE_LOW,
    cube_addresses,
)
from sims.mujoco.tabletop import SPACING
from sims.mujoco.tasks.lift import LiftTask

_ELSEWHERE, _OVER_A_CUBE, _HOLDING = 0, 1, 2
_SHARES = (0.45, 0.35, 0.20)  # of the pictures, by the pose of the gripper


class Scenes(NamedTuple):
    """``n`` labelled pictures.

    images  uint8 [n,size,size,3]
    tasks   int64 [n]      index into the lift environment's ``spec.tasks``
    uv      float32 [n,P,2]  the P positions that the instruction names: u right, v down, -1 to 1 from edge to edge
    state   float32 [n,8]  as the environment's ``state``
    """

    images: np.ndarray
    tasks: np.ndarray
    uv: np.ndarray
    state: np.ndarray


def random_scenes(
    count: int, seed: int, size: int = 64, camera: str = "front", cubes: int = 3, colours: int = 4
) -> Scenes:
    """Draw ``count`` scenes: the gripper anywhere above the cubes, low around one of them, or holding one."""
    task, rng = LiftTask(cubes, colours), np.random.Generator(np.random.PCG64(seed))
    qpos, ctrl = np.zeros((count, task.model.nq)), np.zeros((count, task.model.nu))
    for i in range(count):
        qpos[i] = task.place_cubes(task.robot.scatter(cubes, SPACING, rng), rng)
        place_gripper(qpos[i], ctrl[i], np.arange(cubes), rng)
    colour = rng.permuted(np.tile(np.arange(colours, dtype=np.int8), (count, 1)), axis=1)[:, :cubes]
    named = rng.integers(cubes, size=count).astype(np.int8)
    task_state = {"colour": colour, "named": named}
    renderer = Renderer(task.model, size, size, task.painted)
    out = np.empty((count, size, size, 3), np.uint8)
    images = renderer.render(qpos, task.colours(task_state), task.mark_positions(task_state), camera, out)
    renderer.close()
    centre = qpos[np.arange(count)[:, None], cube_addresses(cubes)[named][:, None] + np.arange(3)]
    uv = project(task.model, camera, centre[:, None])
    return Scenes(images, task.instruction(task_state), uv, task.proprioception(qpos, ctrl))


def place_gripper(qpos: np.ndarray, ctrl: np.ndarray, cubes: np.ndarray, rng: np.random.Generator) -> None:
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
