"""State-based PPO, ours and rsl_rl's, in the same environments.

Equal on both sides: the environments (``sims/gym.py``, stepped one after the other; an ended one starts its next seed
at once), 32 environments x 64 decisions per iteration, 5 epochs of 4 minibatches, two hidden layers of 64 for actor and
critic, standardised observations for both, the initial noise, gamma and lambda, one thread; the evaluation (the mean
action on the same validation episodes), which is not timed.

Different: ours is the recipe of ``configs/gym.py`` without files; theirs is the ``OnPolicyRunner`` without a log folder
and therefore without logging, with the numbers of its examples except ``_SETTINGS``, the best for it of those tried on
seeds 1 to 6.  Ours was tuned on the same seeds and on 201 to 212; other seeds are measured.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from rsl_rl.env import VecEnv as RslVecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

from vla_rl.contract.batch import OneProcess
from vla_rl.experience.rollout import SeedStream
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.trainers import RunContext, generator

RECIPE = load_config("configs/gym.py:half_cheetah")
GOAL = 1000.0  # mean return
VALIDATION = 1_000_000_000  # first of the seeds that both are evaluated on

Act = Callable[[np.ndarray], np.ndarray]


class Contender(Protocol):
    """A learner that can be stopped and evaluated at any time."""

    def advance(self, iterations: int) -> None:
        """Collect and learn; only this is timed."""

    def act(self, state: np.ndarray) -> np.ndarray:
        """The deployed action [E,D] in ``state`` [E,S]."""


class Ours:
    """The recipe of ``configs/gym.py`` as ``vla-rl train`` runs it, without files and progress bar."""

    def __init__(self, recipe: Improve, env: Any, seed: int) -> None:
        context = RunContext(recipe.env, None, seed, OneProcess())
        self._policy = recipe.rl.build_policy(context, env)
        self._learner = recipe.rl.build_learner(context, env, self._policy)
        seeds = SeedStream(seed * 10_000_000, (seed + 1) * 10_000_000)
        self._source = recipe.rl.experience.build(env, self._policy, seeds, generator(seed, 5))

    def advance(self, iterations: int) -> None:
        for _ in range(iterations):
            self._learner.update(self._source.next())

    def act(self, state: np.ndarray) -> np.ndarray:
        features = {"state": torch.as_tensor(state)}
        return self._policy.act(features, {}, "eval", None)[0].action[:, 0].numpy()


class RslEnv(RslVecEnv):
    """``env`` with rsl_rl's interface: environments reset themselves, and ``time_outs`` marks truncations."""

    def __init__(self, env: Any, seed: int) -> None:
        self._env, self._next = env, seed * 10_000_000
        self.num_envs, self.num_actions = env.num_envs, env.spec.action_dim
        self.max_episode_length = env.spec.time_limit
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.device, self.cfg = "cpu", {}
        self._obs = self._reset(np.arange(self.num_envs))

    def get_observations(self) -> TensorDict:
        return self._obs

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        step = self._env.step(actions.numpy()[:, None])
        ended = np.flatnonzero(step.done)
        self._obs = self._reset(ended) if ended.size else self._shown(step.obs)
        extras = {"time_outs": torch.as_tensor(step.truncated)}
        return self._obs, torch.as_tensor(step.reward[:, 0]), torch.as_tensor(step.done), extras

    def _reset(self, env_ids: np.ndarray) -> TensorDict:
        seeds = self._next + np.arange(env_ids.size)
        self._next += env_ids.size
        return self._shown(self._env.reset(env_ids, seeds))

    def _shown(self, obs: Any) -> TensorDict:
        return TensorDict({"state": torch.as_tensor(obs.state)}, batch_size=[self.num_envs])


class Theirs:
    """rsl_rl's ``OnPolicyRunner`` without a log folder and therefore without logging."""

    def __init__(self, recipe: Improve, env: Any, seed: int, **settings: Any) -> None:
        torch.manual_seed(seed)
        with contextlib.redirect_stdout(io.StringIO()):
            self._runner = OnPolicyRunner(RslEnv(env, seed), _rsl_config(recipe, {**_SETTINGS, **settings}))

    def advance(self, iterations: int) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._runner.learn(iterations)

    def act(self, state: np.ndarray) -> np.ndarray:
        obs = TensorDict({"state": torch.as_tensor(state)}, batch_size=[len(state)])
        with torch.inference_mode():
            return self._runner.alg.get_policy()(obs).numpy()


# Tried: ELU and tanh, with and without clipped value loss, KL 0.01, 0.02, 0.04 and 0.06.
_SETTINGS = {"activation": "elu", "use_clipped_value_loss": False, "desired_kl": 0.04}


def _rsl_config(recipe: Improve, settings: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(settings)
    network = {
        "class_name": "MLPModel",
        "hidden_dims": [recipe.rl.policy.width] * recipe.rl.policy.depth,
        "activation": own.pop("activation"),
        "obs_normalization": True,
    }
    noise = {"class_name": "GaussianDistribution", "init_std": recipe.rl.policy.std, "std_type": "scalar"}
    algorithm = {
        "class_name": "PPO",
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "clip_param": 0.2,
        "gamma": recipe.rl.algorithm.gamma,
        "lam": recipe.rl.algorithm.lam,
        "value_loss_coef": 1.0,
        "entropy_coef": 0.0,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "max_grad_norm": 1.0,
        **own,
    }
    return {
        "num_steps_per_env": recipe.rl.experience.decisions,
        "save_interval": 1_000_000,
        "obs_groups": {"actor": ["state"], "critic": ["state"]},
        "actor": {**network, "distribution_cfg": noise},
        "critic": network,
        "algorithm": algorithm,
    }


def mean_return(act: Act, env: Any) -> float:
    """The mean return of one episode in each environment of ``env``; the episodes are the same for both sides."""
    env_ids = np.arange(env.num_envs)
    obs, total, done = env.reset(env_ids, VALIDATION + env_ids), np.zeros(env.num_envs), False
    while not done:
        step = env.step(act(obs.state)[:, None])
        obs, total, done = step.obs, total + step.reward.sum(1), bool(step.done.all())
    return float(total.mean())
