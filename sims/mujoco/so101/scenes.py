"""Random pictures of the arm and its cubes with the position of the named cube, for grounding pretraining.

These are the simulator's own labels: whoever trains with them should say so beside the number of demonstrations.
"""

from __future__ import annotations

import numpy as np

from sims.mujoco.render import Renderer, project
from sims.mujoco.so101 import arm
from sims.mujoco.so101.lift import So101Lift
from sims.mujoco.so101.robot import ROLL
from sims.mujoco.tasks.lift_scenes import Scenes

_HELD, _AROUND = 0.3, 0.4  # shares of the pictures in which the gripper holds a cube, and is close to one
_OPENING = 0.25  # of the gripper that holds a cube


def random_scenes(
    count: int, seed: int, size: int = 64, camera: str = "front", cubes: int = 1, colours: int = 1
) -> Scenes:
    """Draw ``count`` scenes: the gripper anywhere above the cubes, close to one of them, or holding one."""
    task, rng = So101Lift(cubes=cubes, colours=colours), np.random.Generator(np.random.PCG64(seed))
    episodes = [task.sample_episode(rng) for _ in range(count)]
    qpos, ctrl = (np.stack([getattr(episode, name) for episode in episodes]) for name in ("qpos", "ctrl"))
    task_state = {name: np.stack([episode.task_state[name] for episode in episodes]) for name in task.task_state}
    share, chosen, rows = rng.random(count), rng.integers(cubes, size=count), np.arange(count)
    held, around = share < _HELD, (share >= _HELD) & (share < _HELD + _AROUND)
    close = task.centres(qpos)[rows, chosen] + rng.uniform([-0.02, -0.02, 0.0], [0.02, 0.02, 0.06], (count, 3))
    qpos[around, :5] = arm.solve(close[around], ROLL)
    qpos[held, 5] = arm.closing_angle(_OPENING)
    places = qpos[:, task.robot.first_cube :].reshape(count, cubes, 7)
    places[rows[held], chosen[held], :3] = arm.pinch_point(qpos[held])
    ctrl[:, :6] = qpos[:, :6]
    renderer = Renderer(task.model, size, size, task.painted)
    out = np.empty((count, size, size, 3), np.uint8)
    images = renderer.render(qpos, task.colours(task_state), task.mark_positions(task_state), camera, out)
    renderer.close()
    uv = project(task.model, camera, task.centres(qpos)[rows, task_state["named"]][:, None])
    return Scenes(images, task.instruction(task_state), uv, task.proprioception(qpos, ctrl))
