"""A reset environment is in MuJoCo's own initial state, whatever happened before."""

from __future__ import annotations

import mujoco
import numpy as np

from sims.catalog import make

WHOLE = mujoco.mjtState.mjSTATE_INTEGRATION.value


def fresh(task, seed):
    """The whole integration state of a new ``MjData`` at the beginning of the episode of ``seed``."""
    episode, data = task.sample_episode(np.random.Generator(np.random.PCG64(seed))), mujoco.MjData(task.model)
    data.qpos[:], data.ctrl[:] = episode.qpos, episode.ctrl
    state = np.empty(mujoco.mj_stateSize(task.model, WHOLE))
    mujoco.mj_getState(task.model, data, state, WHOLE)
    assert data.eq_active.all(), "the fingers are coupled by an equality, which is part of the state"
    return state


def test_a_reset_leaves_nothing_of_the_last_episode():
    env = make("lift", num_envs=2, render=False)
    env.reset([0, 1], [1, 2])
    env.step(np.full((2, 20, 4), (0.01, 0.0, -0.01, 1.0), np.float32))
    env.reset([1], [7])
    assert np.array_equal(env.snapshot([1])["physics"][0], fresh(env.task, 7))
    assert not np.array_equal(env.snapshot([0])["physics"][0], fresh(env.task, 1))


def test_the_first_episode_begins_as_mujoco_does():
    env = make("lift", num_envs=2, render=False)
    env.reset([1, 0], [3, 4])
    assert np.array_equal(env.snapshot([0, 1])["physics"], np.stack([fresh(env.task, 4), fresh(env.task, 3)]))
