"""How often the features of a rollout are held: they are most of the memory of a learner from pictures or prefixes."""

from __future__ import annotations

import pytest
import torch

from sims.catalog import make
from tests.toys import seeded
from vla_rl.algorithms.decisions import Gathered, flatten
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.training.shapes_only import LiveBytes

ENVS, DECISIONS, SIZE = 8, 16, 5_000
OBSERVATION = 4 * SIZE * ENVS  # bytes of the heavy feature of one observation of all environments


class Heavy(GaussianPolicy):
    """Its features hold ``SIZE`` numbers an environment, like a prefix; nothing else of the run is as large."""

    def encode(self, obs):
        features = super().encode(obs)
        return {**features, "prefix": features["state"][:, :1] * torch.ones(SIZE)}


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
    once = (DECISIONS + 1) * OBSERVATION
    for _ in range(2):
        with LiveBytes() as live:
            rollout = source.next()
        assert once <= live.peak <= once + 3.2 * OBSERVATION, "collected features are written where they stay"
        with LiveBytes() as live:
            metrics = learner.update(rollout)
        assert metrics["rollout/decisions"] == ENVS * DECISIONS
        assert once < live.peak <= copies * once
        del rollout


def test_gathered_features_are_those_of_the_flat_decisions():
    mask = torch.rand(5, 3, generator=seeded()) < 0.7
    features = {"a": torch.randn(6, 3, 4, generator=seeded(1)), "b": torch.arange(18).reshape(6, 3)}
    found, index = Gathered.where(features, mask), torch.tensor([4, 0, 2])
    assert list(found) == ["a", "b"] and len(found) == 2
    for name, item in features.items():
        expected = flatten(item[:-1], mask)
        assert torch.equal(found[name], expected) and torch.equal(found.select(index)[name], expected[index])
