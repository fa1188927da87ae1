"""The files that show how to extend the project: complete, short, and working with one line elsewhere or none."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

import sims.catalog
from docs.examples.noisy_policy import LinearGaussian
from docs.examples.reinforce import Reinforce, ReinforceConfig
from sims.catalog import make
from sims.toy.point_mass import optimal_return
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.check import check_env, check_policy
from vla_rl.contract.policy import LikelihoodPolicy
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import collect
from vla_rl.training.loop import Loop, LoopConfig, PolicyStore

REACH = EnvConfig(name="reach", options={"render": False})


@pytest.fixture
def reach(monkeypatch):
    """The one line."""
    monkeypatch.setitem(sims.catalog.CATALOG, "reach", "docs.examples.reach_task:make")


# -- the task ----------------------------------------------------------------------------------------------------------


def test_the_task_keeps_the_contract(reach):
    with closing(make("reach", num_envs=3)) as env:
        assert len(check_env(env)) == 7
        assert env.spec.tasks[0] == "reach for the red cube"


def test_its_expert_succeeds_and_standing_still_does_not(reach):
    episodes = collect(REACH, 16, seed=0)
    assert episodes.count == 16
    with closing(REACH.make(16)) as env:
        env.reset(np.arange(16), np.arange(16))
        step = env.step(np.zeros((16, env.spec.time_limit, 4)))
        assert step.success.mean() < 0.2 and set(step.cause) <= {"success", "time_limit"}


def test_a_swapped_instruction_names_another_cube(reach):
    with closing(REACH.make(8)) as plain, closing(REACH.make_swapped(8)) as swapped:
        named = [env.reset(np.arange(8), np.arange(8)).task for env in (plain, swapped)]
    assert (named[0] != named[1]).all()
    assert collect(REACH.with_options(instruct="distractor"), 8, seed=0).count == 8


# -- the policy and the algorithm --------------------------------------------------------------------------------------


def test_the_policy_keeps_the_contract():
    with closing(make("point_mass", num_envs=4)) as env:
        policy = LinearGaussian(env.spec)
        found = check_policy(policy, env, torch.Generator().manual_seed(0))
    assert isinstance(policy, LikelihoodPolicy)
    assert found[-1].name == "log-prob gap"


@pytest.mark.full
def test_the_algorithm_improves_the_policy():
    env, policy, source, critic = _learning()
    learner = Reinforce(policy, policy.trainable(), critic, ReinforceConfig(), OneProcess())
    regrets = []
    for _ in range(100):
        rollout = source.next()
        learner.update(rollout)
        regrets.append(_regret(rollout))
    assert np.mean(regrets[-5:]) < 0.2 * np.mean(regrets[:5]), regrets[::10]
    outcomes = evaluate(env, policy, range(64))
    assert outcomes.rate.success > 0.9


def test_algorithms_and_policies_are_interchangeable():
    """PPO takes the policy of the example; the loop takes the algorithm of the example."""
    env, policy, source, critic = _learning()
    ppo = PPO(policy, policy.trainable(), critic, PPOConfig(critic_warmup=0), torch.Generator().manual_seed(2))
    assert ppo.update(source.next())["policy/logprob_gap"] < 1e-4
    env, policy, source, critic = _learning()
    learner = Reinforce(policy, policy.trainable(), critic, ReinforceConfig(), OneProcess())
    loop = Loop(  # type: ignore[arg-type]
        source,
        learner,
        PolicyStore(policy),
        lambda: evaluate(env, policy, range(64)).rate,
        LoopConfig(2, 1),
    )
    assert loop.run().iteration in (0, 1, 2)
    assert policy.version == 3  # two iterations, and the best weights at the end


def _learning():
    env = make("point_mass", num_envs=64)
    torch.manual_seed(0)
    policy, critic = LinearGaussian(env.spec), ValueCritic({"state": 2}, width=32)
    source = RolloutSource(env, policy, env.spec.time_limit, SeedStream(0, 10**6), torch.Generator().manual_seed(1))
    return make("point_mass", num_envs=64), policy, source, critic


def _regret(rollout):
    """How much less than the optimum the rollout's episodes earned: each environment plays exactly one of them."""
    return float((optimal_return(rollout.features["state"][0].numpy()) - rollout.reward.sum((0, 2)).numpy()).mean())
