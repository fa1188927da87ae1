"""An environment that is learnt in seconds: the action moves a bright square on a dark table."""

from __future__ import annotations

import numpy as np

from tests.world_models.small_models import SIDE
from vla_rl.experience.demonstrations import Trajectories

GOAL = 0.25  # the square's x from which on task 0 is done; task 1 asks for the other side


def played(count: int, seed: int, length: int = 9) -> Trajectories:
    """Random episodes: smooth random pushes; an episode ends when its task is done."""
    chooser = np.random.default_rng(seed)
    parts = [_episode(chooser, length) for _ in range(count)]
    return Trajectories.joined(parts)


def _episode(chooser: np.random.Generator, length: int) -> Trajectories:
    place, task = chooser.uniform(-0.6, 0.6, 2), int(chooser.integers(2))
    low, high = np.array([-0.5, -2.0]), np.array([0.5, 1.0])
    habit = chooser.uniform(low, high)
    states, actions, won = [place], [], False
    while len(actions) < length and not won:
        action = np.clip(habit + 0.2 * chooser.normal(size=2), low, high).astype(np.float32)
        place = moved(place, action)
        states.append(place)
        actions.append(action)
        won = bool(place[0] > GOAL if task == 0 else place[0] < -GOAL)
    state = np.array(states, np.float32)
    last = np.arange(len(state)) == len(state) - 1
    return Trajectories(
        {"front": np.stack([picture(place) for place in state])},
        state=np.concatenate([state, np.zeros((len(state), 1), np.float32)], 1),
        action=np.array([*actions, np.zeros(2, np.float32)], np.float32),
        task=np.full(len(state), task),
        success=last & won,
        failed=np.zeros(len(state), bool),
        episode=np.zeros(len(state), np.int64),
        seed=np.zeros(len(state), np.int64),
        reward=rewards(state, task),
    )


def rewards(state: np.ndarray, task: int) -> np.ndarray:
    """float32 [n]: twice the way towards the task's side, less how far from the middle line the square then is.

    ``state`` [n,2] are the places of an episode; the last one is left by no action and has 0.
    """
    way = np.diff(state[:, 0]) * (1.0 if task == 0 else -1.0)
    return np.append(2.0 * way - np.abs(state[1:, 1]), 0.0).astype(np.float32)


def moved(place: np.ndarray, action: np.ndarray) -> np.ndarray:
    """A fifth of the table to the right or left for a full first entry, less for the second."""
    return np.clip(place + np.array([0.4, 0.1]) * action, -0.75, 0.75)


def picture(place: np.ndarray) -> np.ndarray:
    """uint8 [h,w,3]: a square of four pixels, its edges softened to show fractions of a pixel."""
    grid = (np.arange(SIDE) + 0.5) / SIDE * 2 - 1
    columns, lines = (np.clip((0.25 - np.abs(grid - centre)) * SIDE / 2 + 0.5, 0, 1) for centre in place)
    shade = lines[:, None] * columns[None]
    return np.stack([40 + 200 * shade, 40 + 100 * shade, 60 + 0 * shade], -1).round().astype(np.uint8)
