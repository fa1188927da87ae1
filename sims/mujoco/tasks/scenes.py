"""Random pictures of any tabletop task with the positions that its instruction names, for grounding pretraining.

These are the simulator's own labels: whoever trains with them should say so beside the number of demonstrations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sims.mujoco.render import Renderer, project
from sims.mujoco.scene import FINGER_OPEN, FINGER_QPOS, GANTRY_QPOS, WORKSPACE_HIGH, WORKSPACE_LOW
from sims.mujoco.tabletop import UNSEEN
from sims.mujoco.task import TaskState
from sims.mujoco.tasks.lift_scenes import Scenes, place_gripper
from sims.mujoco.tasks.mixed import MixedTask
from sims.mujoco.tasks.place import PlaceTask
from sims.mujoco.tasks.push import PushTask

_TOUCHING = 0.3  # share of the pictures in which closed fingers stand beside a cube, as in a push


def random_scenes(task: Any, count: int, seed: int, size: int = 64, camera: str = "front") -> Scenes:
    """Draw ``count`` episodes of ``task``, with the gripper at a random pose; ``uv`` holds the cube, then its goal."""
    rng = np.random.Generator(np.random.PCG64(seed))
    qpos, ctrl = np.zeros((count, task.model.nq)), np.zeros((count, task.model.nu))
    task_states: list[TaskState] = []
    for row in range(count):
        episode = task.sample_episode(rng)
        qpos[row], present = episode.qpos, np.flatnonzero(episode.task_state["colour"] != UNSEEN)
        if rng.random() < _TOUCHING:
            _stand_beside(task, qpos[row], ctrl[row], int(rng.choice(present)), rng)
        else:
            place_gripper(qpos[row], ctrl[row], present, rng)
        task_states.append(episode.task_state)
    task_state = {name: np.stack([item[name] for item in task_states]) for name in task.task_state}
    renderer = Renderer(task.model, size, size, task.painted, task.placed)
    out = np.empty((count, size, size, 3), np.uint8)
    images = renderer.render(qpos, task.colours(task_state), task.mark_positions(task_state), camera, out)
    renderer.close()
    extras = task.observe_extras(qpos, task_state)
    named = np.stack([extras["privileged/target"], extras["privileged/goal"]], axis=1)
    uv = project(task.model, camera, named.astype(np.float64))
    return Scenes(images, task.instruction(task_state), uv, task.proprioception(qpos, ctrl))


def place(count: int, seed: int, **options: Any) -> Scenes:
    """Pictures of place."""
    return random_scenes(PlaceTask(), count, seed, **options)


def push(count: int, seed: int, **options: Any) -> Scenes:
    """Pictures of push."""
    return random_scenes(PushTask(), count, seed, **options)


def mixed(count: int, seed: int, **options: Any) -> Scenes:
    """Pictures of all three tasks."""
    return random_scenes(MixedTask(), count, seed, **options)


def _stand_beside(task: Any, qpos: np.ndarray, ctrl: np.ndarray, cube: int, rng: np.random.Generator) -> None:
    """Closed fingers, low, 2 to 6 cm from the centre of ``cube``."""
    angle, away = rng.uniform(0, 2 * np.pi), rng.uniform(0.026, 0.06)
    centre = task.cubes(qpos[None])[0, cube, :2]
    pinch = np.array([*(centre + away * np.array([np.cos(angle), np.sin(angle)])), rng.uniform(0.016, 0.07)])
    pinch = np.clip(pinch, WORKSPACE_LOW, WORKSPACE_HIGH)
    qpos[GANTRY_QPOS], qpos[FINGER_QPOS] = pinch, rng.choice([0.0, FINGER_OPEN], p=[0.8, 0.2])
    ctrl[:3], ctrl[3] = pinch, 0.0
