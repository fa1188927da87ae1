"""Stable-Baselines3 on our environments: what it is given is right, and it learns."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed: pip install stable-baselines3")

from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sims.as_sb3 import SB3VecEnv, make_vec
from vla_rl.contract.errors import UserError

POINT_MASS = "vla_rl/point_mass-v0"


def test_its_own_checker_passes():
    check_env(gymnasium.make(POINT_MASS).unwrapped)
    check_env(gymnasium.make("vla_rl/lift-v0", render=False, privileged=True).unwrapped)


def test_it_gets_what_it_gets_from_single_environments():
    """Its own vector environment of single ones is the reference, ends and last observations included."""
    ours, theirs = make_vec("vla_rl/counting-v0", num_envs=3, seed=5), make_vec_env("vla_rl/counting-v0", 3, seed=5)
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    first, other = ours.reset(), theirs.reset()
    assert all(np.array_equal(first[name], other[name]) for name in other)
    rng, ends = np.random.default_rng(0), 0
    for _ in range(60):
        action = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        (obs, reward, done, infos), (obs2, reward2, done2, infos2) = ours.step(action), theirs.step(action)
        assert all(np.array_equal(obs[name], obs2[name]) for name in obs)
        assert np.array_equal(reward, reward2) and np.array_equal(done, done2)
        for i in np.flatnonzero(done):
            ends += 1
            for name in ("is_success", "cause", "TimeLimit.truncated"):
                assert infos[i][name] == infos2[i][name], name
            assert infos[i]["episode"]["r"] == infos2[i]["episode"]["r"]
            last, last2 = infos[i]["terminal_observation"], infos2[i]["terminal_observation"]
            assert all(np.array_equal(last[name], last2[name]) for name in last)
    assert ends > 6


def test_another_autoreset_mode_is_refused():
    with pytest.raises(UserError, match="autoreset_mode='SameStep'"):
        SB3VecEnv(gymnasium.make_vec(POINT_MASS, num_envs=2))
    with pytest.raises(UserError, match="asks for single environments"):
        make_vec(POINT_MASS, num_envs=2).env_method("reset")


@pytest.mark.full
def test_it_learns_the_point_mass():
    model = PPO("MlpPolicy", make_vec(POINT_MASS, 16, seed=0), n_steps=64, batch_size=256, seed=0, device="cpu")
    test = make_vec(POINT_MASS, 16, seed=10_000)
    before, _ = evaluate_policy(model, test, 64)
    model.learn(30_000)
    after, _ = evaluate_policy(model, make_vec(POINT_MASS, 16, seed=10_000), 64)
    assert after > before / 2, (before, after)
