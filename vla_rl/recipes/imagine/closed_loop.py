"""Success rates of the same policies on the same scenes, imagined and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.contract.env import VecEnv
from vla_rl.contract.policy import Policy
from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation.run import Outcomes, evaluate
from vla_rl.evaluation.stats import Rate
from vla_rl.policies.epsilon_random import EpsilonRandomPolicy
from vla_rl.recipes import world_models
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.imagine.calibrated_model import CalibratedModel
from vla_rl.recipes.imagine.imagined_env import ImaginedEnvFactory
from vla_rl.recipes.progress import bar
from vla_rl.training.world_model import at_least_one

# Of a decision; chosen beforehand, so that the policies range from good to hopeless.
RANDOM_ACTION_PROBS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75)


@dataclass(frozen=True)
class PolicyRating:
    """A policy's success in the world model and in the simulator."""

    name: str
    imagined: Rate
    true: Rate


def rate_policies(
    calibrated: CalibratedModel,
    env: EnvConfig,
    policies: Mapping[str, Policy],
    scenes: Sequence[int],
    num_envs: int,
    seed: int,
) -> list[PolicyRating]:
    """Every one of ``policies`` with each of ``RANDOM_ACTION_PROBS``, from the first observations of ``scenes``.

    Imagined rollouts have the trusted horizon and end as in RL; simulated episodes have RL's deadline.
    """
    first = first_observations(env, scenes, calibrated.model)
    pool = world_models.ordered_pool(first)
    factory = ImaginedEnvFactory(calibrated.model, pool, calibrated.limits, calibrated.imagination)
    ratings = []
    for name, policy in policies.items():
        for share in RANDOM_ACTION_PROBS:
            player = EpsilonRandomPolicy(policy, calibrated.model.spec, share) if share else policy
            title = f"{name}, {share:.0%} random" if share else name
            imagined = _evaluate(factory, player, range(len(scenes)), num_envs, seed, f"imagined: {title}")
            true = _evaluate(_TrainingEnvs(env), player, scenes, num_envs, seed, f"simulated: {title}")
            ratings.append(PolicyRating(title, imagined.rate, true.rate))
    return ratings


@dataclass(frozen=True)
class _TrainingEnvs:
    """The environments of RL, to evaluate in."""

    env: EnvConfig

    def make(self, num_envs: int) -> VecEnv:
        return self.env.make_training(num_envs)

    make_training = make

    def spec(self) -> EnvSpec:
        return self.env.spec()


def _evaluate(
    factory: EnvFactory, policy: Policy, seeds: Sequence[int], num_envs: int, seed: int, title: str
) -> Outcomes:
    env = factory.make(num_envs)
    with bar(title, len(seeds)) as update:
        outcomes = evaluate(
            env, policy, seeds, noise_seed=seed, report=lambda done, won: update(done, f"success {won / done:.0%}")
        )
    env.close()
    return outcomes


def first_observations(
    env_config: EnvConfig, scenes: Sequence[int], model: world_models.WorldModel
) -> world_models.InitialStates:
    """The first observation of each of ``scenes``, which is all of its context."""
    env, parts = env_config.make(min(64, len(scenes))), []
    for first in range(0, len(scenes), env.num_envs):
        batch = np.array(scenes[first : first + env.num_envs])
        obs = env.reset(np.arange(len(batch)), batch).select(slice(0, len(batch)))
        context = np.repeat(model.canvas.stack(obs.images)[:, None], 1 + model.config.context_frames, 1)
        parts.append((context, at_least_one(np.asarray(obs.state)), np.asarray(obs.task), np.asarray(obs.time)))
    env.close()
    return world_models.initial_states(*(np.concatenate(items) for items in zip(*parts, strict=True)))
