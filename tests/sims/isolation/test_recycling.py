"""Workers that are replaced before what they leak ends them."""

from __future__ import annotations

import itertools
import warnings
from contextlib import closing

import numpy as np

from sims.catalog import make
from sims.toy.counting import episode_length
from tests.sims.isolation.test_isolated import same_observation, same_step

LONG = [seed for seed in range(100) if episode_length(np.array(seed)) > 20]  # seeds of long episodes
ONES = np.ones((2, 1, 2), np.float32)


def isolated(recycle_steps):
    return closing(make("isolated", num_envs=2, env="counting", recycle_steps=recycle_steps))


def test_a_worker_that_has_worked_enough_is_replaced_between_episodes_and_nothing_else_changes():
    pids = []
    with isolated(8) as far, closing(make("counting", num_envs=2)) as near, warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in range(5):
            seeds = LONG[start : start + 2]
            assert same_observation(far.reset([0, 1], seeds), near.reset([0, 1], seeds))
            pids.append(far.workers[0].link.pid)
            for _ in range(3):
                assert same_step(far.step(ONES), near.step(ONES))
        assert far.restarts == far.truncated_by_worker == 0
    assert [one == other for one, other in itertools.pairwise(pids)] == [True, False, True, False]


def test_it_waits_for_an_episode_that_is_running_but_not_for_ever():
    with isolated(8) as env:
        env.reset([0, 1], LONG[:2])
        first = env.workers[0].link.pid
        for _ in range(4):
            env.step(ONES)
        env.reset([0], LONG[2:3])
        assert env.workers[0].link.pid == first
        before = env.step(ONES)
        assert before.cause == ("", "")
        obs = env.reset([0], LONG[3:4])
        assert env.workers[0].link.pid != first and obs.state[0, 0] == LONG[3]
        assert obs.time.tolist() == [0, 5] and obs.state[1].tolist() == before.obs.state[1].tolist()
        step = env.step(ONES)
        assert step.cause == ("", "worker") and step.valid[:, 0].tolist() == [True, False]
        assert env.truncated_by_worker == 1
