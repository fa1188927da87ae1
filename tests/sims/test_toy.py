"""The toy environments follow their documented rules, on which other tests rely."""

from __future__ import annotations

import numpy as np

from sims.catalog import make
from sims.toy.counting import episode_length, expected_reward
from sims.toy.point_mass import optimal_action, optimal_return


def test_counting_episodes_are_ragged_and_can_be_recomputed():
    seeds = np.arange(100, 164)
    env = make("counting", num_envs=64)
    obs = env.reset(np.arange(64), seeds)
    earned, ended = np.zeros(64), np.zeros(64, int)
    for _ in range(4):
        step = env.step(np.tile(np.array([1.0, 7.0], np.float32), (64, 8, 1)))
        earned += step.reward.sum(1)
        ended += step.valid.sum(1)
        obs = step.obs
    length = episode_length(seeds)
    assert len(set(length)) > 10 and (length % 5 != 0).any() and np.array_equal(ended, length)
    assert np.array_equal(earned, [expected_reward(np.arange(1, n + 1)).sum() for n in length])
    assert np.array_equal(step.terminated, seeds % 2 == 0) and np.array_equal(step.truncated, seeds % 2 == 1)
    assert np.array_equal(obs.state, np.stack([seeds, length, length, length], 1))
    assert np.array_equal(obs.images["audit"][:, 0, 0, 1], seeds % 256)


def test_the_point_masss_optimal_policy_earns_the_optimal_return():
    env = make("point_mass", num_envs=32)
    obs = env.reset(np.arange(32), np.arange(32))
    best, earned = optimal_return(obs.state), np.zeros(32)
    step = None
    for _ in range(env.spec.time_limit):
        step = env.step(optimal_action(obs)[:, None])
        obs = step.obs
        earned += step.reward[:, 0]
    assert step is not None and step.success.all() and step.terminated.all()
    assert np.allclose(earned, best, atol=1e-5)
    env.reset(np.arange(32), np.arange(32))
    lazy = env.step(np.zeros((32, 16, 2)))
    assert lazy.truncated.all() and lazy.cause == ("time_limit",) * 32 and not lazy.success.any()
