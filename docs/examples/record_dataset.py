"""Your recordings as a LeRobotDataset v3.0: ``python record_dataset.py FOLDER``, to be imitated by vla-rl or lerobot.

``my_episodes`` stands for whatever you have: log files, a teleoperation loop, another simulator.  An episode is safe on
the disk when ``add`` returns; if the process is killed, ``vla-rl collect --repair FOLDER`` finishes the dataset.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vla_rl.experience.datasets import Recording
from vla_rl.experience.demonstrations import Demonstrations

FPS = 20
TASKS = ("go to the left mark", "go to the right mark")


def my_episodes(count: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """Images uint8 [n,32,32,3], state float32 [n,2], actions float32 [n,1] and the task's number, one by one."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        task = int(rng.integers(2))
        goal, x, speed = (-0.5, 0.5)[task], float(rng.uniform(-0.9, 0.9)), 0.0
        images, states, actions = [], [], []
        for _ in range(30):
            push = float(np.clip(12 * (goal - x) - 6 * speed, -4, 4))
            image = np.full((32, 32, 3), 230, np.uint8)
            column = round((x + 1) / 2 * 29)
            image[14:22, column : column + 3] = (40, 40, 200)
            images.append(image)
            states.append((x, speed))
            actions.append((push,))
            speed += push / FPS
            x = float(np.clip(x + speed / FPS, -1, 1))
        yield np.stack(images), np.array(states, np.float32), np.array(actions, np.float32), task


def main(folder: Path, count: int = 20) -> None:
    """Write ``count`` episodes into ``folder``."""
    with Recording(folder) as dataset:
        for images, state, action, task in my_episodes(count):
            steps = len(state)
            dataset.add(
                Demonstrations(
                    images={"side": images},
                    state=state,
                    task=np.full(steps, task),
                    time=np.arange(steps),
                    action=action,
                    episode=np.zeros(steps, np.int64),
                    seed=np.full(steps, -1),
                    tasks=TASKS,
                    fps=FPS,
                    state_names=("x", "speed"),
                    action_names=("push",),
                    robot="ball",
                )
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
