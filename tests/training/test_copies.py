"""How often the features of a rollout are held: they are most of the memory of a learner from pictures or prefixes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sims.catalog import make
from tests.algorithms.ppo_learners import seeded
from vla_rl.algorithms.decisions import Gathered, flatten
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.gaussian import GaussianConfig, GaussianPolicy

ENVS, DECISIONS, SIZE = 8, 16, 5_000
OBSERVATION = 4 * SIZE * ENVS  # bytes of the heavy feature of one observation of all environments


class Heavy(GaussianPolicy):
    """Its features hold ``SIZE`` numbers an environment, like a prefix; nothing else of the run is as large."""

    def encode(self, obs):
        features = super().encode(obs)
        return {**features, "prefix": features["state"][:, :1] * torch.ones(SIZE)}


class Counted(TorchDispatchMode):
    """After each operation on large tensors, counts the bytes of large storages that are alive beside ``others``."""

    def __init__(self, others: int) -> None:
        super().__init__()
        self.others, self.peak = others, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().nbytes() >= OBSERVATION // ENVS:
            self.peak = max(self.peak, alive() - self.others)
        return found


def alive() -> int:
    """Bytes of the storages of at least one environment's heavy feature, each counted once."""
    tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors}
    return sum(size for size in storages.values() if size >= OBSERVATION // ENVS)


@pytest.mark.parametrize(("micro_batch", "copies"), [(8, 1.2), (0, 2.1)])
def test_an_iteration_of_ppo_holds_features_once_and_what_it_computes_with(micro_batch, copies):
    """A copy in the rollout, and a micro-batch; or the whole where one forward pass is over all decisions."""
    torch.manual_seed(0)
    env = make("point_mass", num_envs=ENVS)
    policy = Heavy(env.spec, config=GaussianConfig(width=8, depth=1))
    critic = ValueCritic({"state": 2, "time": 1}, width=8)
    config = PPOConfig(critic_warmup=0, epochs=2, minibatch=ENVS * DECISIONS // 4, micro_batch=micro_batch)
    source = RolloutSource(env, policy, DECISIONS, SeedStream(0, 10**6), seeded())
    learner = PPO(policy, policy.trainable(), critic, config, seeded())
    gc.collect()
    once, others = (DECISIONS + 1) * OBSERVATION, alive()  # what earlier tests of this process keep
    for _ in range(2):
        with Counted(others) as counted:
            rollout = source.next()
        assert once <= counted.peak <= once + 3 * OBSERVATION, "collected features are written where they stay"
        with Counted(others) as counted:
            metrics = learner.update(rollout)
        assert metrics["rollout/decisions"] == ENVS * DECISIONS
        assert once < counted.peak <= copies * once
        del rollout


def test_gathered_features_are_those_of_the_flat_decisions():
    mask = torch.rand(5, 3, generator=seeded()) < 0.7
    features = {"a": torch.randn(6, 3, 4, generator=seeded(1)), "b": torch.arange(18).reshape(6, 3)}
    found, index = Gathered.where(features, mask), torch.tensor([4, 0, 2])
    assert list(found) == ["a", "b"] and len(found) == 2
    for name, item in features.items():
        expected = flatten(item[:-1], mask)
        assert torch.equal(found[name], expected) and torch.equal(found.select(index)[name], expected[index])
