"""The learners of ``make peers``, each behind ``advance`` and ``act``; all read the rollouts of our recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from sims.catalog import make
from tests.benchmarks.peers.plain_ppo import PlainPPO, Settings, single
from tests.benchmarks.peers.state_ppo import Contender, Ours, Theirs
from vla_rl.recipes.improve import Improve


class StableBaselines:
    """Stable-Baselines3's PPO on its own ``DummyVecEnv``, observations and rewards by its ``VecNormalize``."""

    def __init__(self, recipe: Improve, seed: int, **settings: Any) -> None:
        sizes = recipe.rl.experience
        self._per_iteration = sizes.num_envs * sizes.decisions
        envs = DummyVecEnv([single(recipe.env.options)] * sizes.num_envs)
        envs.seed(seed * 10_000_000)
        self._normalize = VecNormalize(envs, gamma=recipe.rl.algorithm.gamma)
        given: dict[str, Any] = {
            "n_steps": sizes.decisions,
            "device": "cpu",
            "seed": seed,
            "gamma": recipe.rl.algorithm.gamma,
        }
        self._model = PPO("MlpPolicy", self._normalize, **{**given, **settings})

    def advance(self, iterations: int) -> None:
        self._model.learn(iterations * self._per_iteration, reset_num_timesteps=False)

    def act(self, state: np.ndarray) -> np.ndarray:
        obs = np.asarray(self._normalize.normalize_obs(state), np.float32)
        return self._model.predict(obs, deterministic=True)[0]


def _ours(recipe: Improve, seed: int) -> Contender:
    return Ours(recipe, make("gym", num_envs=recipe.rl.experience.num_envs, **recipe.env.options), seed)


def _rsl_rl(recipe: Improve, seed: int) -> Contender:
    return Theirs(recipe, make("gym", num_envs=recipe.rl.experience.num_envs, **recipe.env.options), seed)


def _stable_baselines(recipe: Improve, seed: int) -> Contender:
    return StableBaselines(recipe, seed, **SB3)


def _plain(recipe: Improve, seed: int) -> Contender:
    sizes = recipe.rl.experience
    return PlainPPO(single(recipe.env.options), sizes.num_envs, sizes.decisions, seed, PLAIN)


# Each is the fastest of those tried on seeds 1 to 3; docs/results/speed.md names the others.
SB3: Mapping[str, Any] = {
    "learning_rate": 3e-3,
    "batch_size": 512,
    "n_epochs": 5,
    "policy_kwargs": {"activation_fn": nn.ELU, "log_std_init": math.log(0.6)},
}
PLAIN = Settings(lr=3e-3, minibatches=4, epochs=5, std=0.6)
PEERS: Mapping[str, Callable[[Improve, int], Contender]] = {
    "ours": _ours,
    "rsl_rl": _rsl_rl,
    "stable_baselines3": _stable_baselines,
    "cleanrl_style": _plain,
}
