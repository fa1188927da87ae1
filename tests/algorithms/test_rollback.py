"""A rollback restores all that led to the collapse: weights, critics, targets, moments; and keeps what it must keep."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.algorithms.ppo_learners import learner as ppo_learner
from tests.algorithms.ppo_learners import seeded
from tests.algorithms.test_iql import QUICK as IQL
from tests.algorithms.test_residual_td3 import whole
from tests.algorithms.test_sac import QUICK as SAC
from tests.off_policy_toys import critics, env_spec, recorded, squashed
from tests.residuals import POINT, SMALL, StateEncoder, biased_base
from tests.toys import bandit
from vla_rl.algorithms.ppo import PPO
from vla_rl.experience.curriculum import SeedStream
from vla_rl.experience.replay import Replay
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.residual import GaussianResidual


def off_policy(config):
    policy, replay = squashed(env_spec()), Replay(2000, 0.9)
    replay.add(recorded(256, seeded(4)))
    return config.build(policy, policy.trainable(), critics(policy), replay, seeded())


def tensors(learner) -> dict[str, torch.Tensor]:
    """All weights of a learner: the policy's and those of every network and target."""
    parts = {f"policy.{name}": item for name, item in learner.parameters.items()}
    for name, item in vars(learner).items():
        if isinstance(item, torch.nn.Module) and name != "policy":
            parts |= {f"{name}.{key}": value for key, value in item.state_dict().items()}
        elif isinstance(item, torch.nn.Parameter):
            parts[name] = item
    parts |= {f"target.{name}": item for name, item in getattr(learner, "target_parameters", {}).items()}
    return {name: item.detach().clone() for name, item in parts.items()}


@pytest.mark.parametrize("config", [SAC, IQL], ids=["sac", "iql"])
def test_critics_and_targets_are_rolled_back_with_the_policy(config):
    learner = off_policy(replace(config, policy_delay=1))
    learner.pretrain(3)
    kept, before, lr = copy.deepcopy(learner.best_state()), tensors(learner), learner.lr
    learner.pretrain(3)
    assert all(not torch.equal(before[name], item) for name, item in tensors(learner).items() if "weight" in name)
    learner.roll_back(kept, 0.5)
    after = tensors(learner)
    assert all(torch.equal(item, after[name]) for name, item in before.items())
    assert learner.lr == lr / 2
    optimizers = [item for item in vars(learner).values() if isinstance(item, torch.optim.Optimizer)]
    assert len(optimizers) >= 3 and not any(item.state for item in optimizers)
    learner.pretrain(1)
    assert any(not torch.equal(before[name], item) for name, item in tensors(learner).items()), "it learns on"


def test_slow_actors_are_rolled_back():
    source, td3 = whole(1)
    for _ in range(3):
        td3.update(source.next())
    kept, before = td3.best_state(), tensors(td3)
    for _ in range(2):
        td3.update(source.next())
    changed = [name for name, item in tensors(td3).items() if not torch.equal(item, before[name])]
    assert any(name.startswith("target.") for name in changed)
    td3.roll_back(kept, 0.5)
    assert all(torch.equal(item, before[name]) for name, item in tensors(td3).items())


def test_a_rollback_to_the_start_keeps_the_input_statistics_of_residual_td3():
    source, td3 = whole(1)
    kept = td3.best_state()
    for _ in range(3):
        td3.update(source.next())
    fitted = td3.policy.delta.trunk.inputs.mean.detach().clone()
    assert td3.steps and fitted.abs().max() > 0
    td3.roll_back(kept, 0.5)
    inputs = [td3.policy.delta.trunk.inputs, td3.critic.inputs, td3.target_critic.inputs]
    assert all(item.mean.abs().max() > 0 and not torch.equal(item.std, torch.ones_like(item.std)) for item in inputs)
    assert all(torch.equal(td3.parameters[name], kept["parameters"][name]) for name in td3.learnt)


def residual_ppo():
    torch.manual_seed(0)
    policy = GaussianResidual(biased_base(), StateEncoder(POINT), SMALL)
    critic = ValueCritic({**policy.feature_sizes, "time": 1}, width=16)
    config = replace(ppo_learner().config, minibatch=32, epochs=1)
    return PPO(policy, policy.trainable(), critic, config, seeded())


def test_a_rollback_to_the_start_keeps_the_input_statistics_of_residual_ppo():
    """Also in a run that was resumed in between."""
    source, _ = whole(1)
    ppo = residual_ppo()
    source.policy = ppo.policy
    source = type(source)(source.env, ppo.policy, 9, SeedStream(1, 10**6), seeded(2))
    kept = copy.deepcopy(ppo.best_state())
    ppo.update(source.next())
    fitted = ppo.policy.delta.trunk.inputs.mean.detach().clone()
    assert fitted.abs().max() > 0 and ppo.calibration
    resumed = residual_ppo()
    resumed.load_state_dict(copy.deepcopy(ppo.state_dict()))
    for learner in (ppo, resumed):
        learner.roll_back(kept, 0.5)
        assert torch.equal(learner.policy.delta.trunk.inputs.mean, fitted)
        assert all(torch.equal(learner.parameters[name], kept["parameters"][name]) for name in learner.learnt)


def test_after_a_rollback_ppo_has_no_moments_and_its_learning_rate_does_not_climb_back():
    ppo = ppo_learner(target_kl=100.0, lr=1e-3)
    ppo.update(bandit(ppo.policy, 64, seeded(1)))
    kept = ppo.best_state()
    assert ppo.optimizer.state and ppo.critic_optimizer.state
    lr = ppo.lr
    ppo.roll_back(kept, 0.5)
    assert ppo.lr == lr / 2 and not ppo.optimizer.state and not ppo.critic_optimizer.state
    resumed = ppo_learner(target_kl=100.0, lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(ppo.state_dict()))
    for learner in (ppo, resumed):
        for seed in range(3):
            learner.update(bandit(learner.policy, 64, seeded(seed)))
        assert learner.lr == lr / 2, "the KL is far below its target, and still"
