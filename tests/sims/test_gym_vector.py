"""Gymnasium's vector environments in every autoreset mode play the episodes of single ones, seed by seed."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from sims.catalog import make
from sims.gym import GymEnv
from vla_rl.contract.check import check_env
from vla_rl.contract.env import Snapshots
from vla_rl.contract.errors import UserError

MODES = [mode.value for mode in AutoresetMode]


class Walk(gymnasium.Env):
    """A random walk that terminates after 1 to 6 steps; it observes (its seed's draw, steps, sum of noise)."""

    observation_space, action_space = Box(-np.inf, np.inf, (3,), np.float64), Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.steps, self.sum = int(self.np_random.integers(1, 7)), 0, 0.0
        return self._obs(), {}

    def step(self, action):
        self.steps, self.sum = self.steps + 1, self.sum + float(action[0]) + self.np_random.normal()
        return self._obs(), self.sum, self.steps >= self.length, False, {}

    def _obs(self):
        return np.array([self.length, self.steps, self.sum])


class Row(SyncVectorEnv):
    """A vector environment of its own kind, for ids without a single form."""

    def __init__(self, num_envs, max_episode_steps, autoreset_mode="NextStep"):
        limited = [lambda: gymnasium.wrappers.TimeLimit(Walk(), max_episode_steps)] * num_envs
        super().__init__(limited, autoreset_mode=autoreset_mode)


gymnasium.register("TestWalk-v0", Walk, max_episode_steps=4)
gymnasium.register("TestRow-v0", vector_entry_point=Row, max_episode_steps=4)


def episodes(env: GymEnv, resets: int = 9) -> list[tuple]:
    """Everything that came of a fixed sequence of chunks; rows are reset late, so that some idle in between."""
    rng, seed, found = np.random.default_rng(0), 100, []
    env.reset(np.arange(4), np.arange(4))
    for i in range(resets):
        step = env.step(rng.uniform(-1, 1, (4, 2, 1)), observe="all")
        found.append((step.obs.state, step.reward, step.valid, step.terminated, step.truncated, step.cause))
        found += [(frame.state, frame.time) for frame in step.frames]
        ended = np.flatnonzero(step.done)[: 1 + i % 2]
        found.append((env.reset(ended, seed + ended).state,))
        seed += 10
    return found


SINGLE = episodes(make("gym", num_envs=4, id="TestWalk-v0"))


def same(one: list[tuple], other: list[tuple]) -> bool:
    return all(
        np.array_equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["sync", "vector_entry_point"])
def test_a_vector_environment_plays_the_episodes_of_single_ones(kind, mode):
    id = "TestWalk-v0" if kind == "sync" else "TestRow-v0"
    how = {"vector_kwargs": {"autoreset_mode": mode}} if kind == "sync" else {"arguments": {"autoreset_mode": mode}}
    env = make("gym", num_envs=4, id=id, vectorization_mode=kind, **how)
    assert not isinstance(env, Snapshots) and same(episodes(env), SINGLE)
    env.close()


def test_processes_play_them_too():
    env = make("gym", num_envs=4, id="TestWalk-v0", vectorization_mode="async")
    assert same(episodes(env), SINGLE)
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_an_id_with_a_vector_form_only_is_played_row_by_row(mode):
    env = make("gym", num_envs=4, id="TestRow-v0", arguments={"autoreset_mode": mode})
    assert isinstance(env, Snapshots) and same(episodes(env), SINGLE)
    assert len(check_env(env, seed=1)) == 7


def test_a_vector_environment_that_resets_all_rows_at_once_is_refused_and_single_ones_are_not():
    with pytest.raises(
        UserError, match=r"'CartPole-v1' as CartPoleVectorEnv resets all .* leave vectorization_mode out"
    ):
        make("gym", num_envs=2, id="CartPole-v1", vectorization_mode="vector_entry_point")
    assert len(check_env(make("gym", num_envs=2, id="CartPole-v1", time_limit=20))) == 7
