"""Code that runs for its shapes alone: masks and indices have values, and nothing large takes memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sims.catalog import make
from tests.toys import seeded
from vla_rl.algorithms.decisions import Gathered, flatten
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy
from vla_rl.training.shapes_only import META, LiveBytes, bytes_of, shapes_only


def test_masks_and_indices_select_what_they_select():
    mask = np.array([[True, False, True], [False, False, True]])
    with shapes_only():
        values = torch.zeros(2, 3, 7, device=META)
        chosen = torch.as_tensor(mask, device=META)
        assert values[chosen].shape == (3, 7) and values[~chosen].shape == (3, 7)
        assert chosen.nonzero().tolist() == [[0, 0], [0, 2], [1, 2]]
        assert values[chosen.T.any(1).nonzero().flatten()[:1], 0].shape == (1, 7)
        counted = chosen.sum(-1)
        counted[0] += 5
        assert counted.tolist() == [7, 1] and int(counted.max()) == 7
        assert torch.tensor([3, 4], device=META).flip(0).cpu().numpy().tolist() == [4, 3]


def test_small_floats_of_known_numbers_are_known():
    with shapes_only():
        reward = torch.as_tensor(np.array([1.0, 3.0], np.float32), device=META)
        assert float(reward.mean()) == 2.0 and (reward > 1.5).tolist() == [False, True]
        assert torch.where(reward > 1.5, reward, 0.0).tolist() == [0.0, 3.0]
        unknown = torch.empty(2, device=META).uniform_() * reward
        assert float(unknown.sum()) == 0.0 and unknown.isfinite().all()
        assert not (unknown != unknown).any()


def test_a_network_that_fits_no_machine_learns():
    with shapes_only():
        with torch.device(META):
            network = nn.Linear(2**20, 2**22)  # 17 TB
        optimizer = torch.optim.Adam(network.parameters())
        loss = network(torch.zeros(8, 2**20, device=META)).square().mean()
        loss.backward()
        optimizer.step()
        assert optimizer.state[network.weight]["exp_avg"].shape == network.weight.shape
        assert float(loss) == 0.0


# -- what counts as alive: storages, once each, until nobody holds them any more ---------------------------------------


def test_views_count_once_and_what_is_freed_counts_no_more():
    with LiveBytes() as live:
        whole = torch.zeros(1000)
        part = whole[:10].view(2, 5)
        assert live.now == 4000
        other = whole + 1.0
        assert live.now == 8000
        del whole, other
        assert live.now == 4000  # the view holds it all
        del part
        assert live.now == 0 and live.peak == 8000


def test_what_came_before_counts_from_its_first_use():
    weight, other, array = torch.zeros(500), torch.zeros(300), np.zeros(250, np.float32)
    with LiveBytes() as live:
        assert live.now == 0
        shared = torch.as_tensor(array)
        product = weight[:250] * shared
        assert live.now == 4 * (500 + 250 + 250)
        del product, shared
        assert live.now == 4 * 500
        float(other.sum())  # which is read, and no part of the result
        assert live.now == 4 * (500 + 300)


def test_activations_are_alive_until_the_backward_pass():
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(10, 1000), nn.Tanh(), nn.Linear(1000, 10)) for _ in range(5)])
    given = torch.zeros(200, 10)
    with LiveBytes() as live:
        loss = layers(given).sum()
        kept = live.now - bytes_of([*layers.parameters(), given])
        assert 5 * 200 * 1000 * 4 <= kept < 1.1 * 5 * 200 * 1000 * 4
        loss.backward()
        assert live.now == bytes_of([*layers.parameters(), *(p.grad for p in layers.parameters()), given, loss])


def test_a_watched_block_has_a_peak_of_its_own():
    notes = []
    with LiveBytes() as live:
        kept = torch.zeros(250)
        with live.watch(lambda before, peak: notes.append((before, peak))):
            torch.zeros(1000)
        with live.watch(lambda before, peak: notes.append((before, peak))):
            torch.zeros(500)
    assert notes == [(1000, 5000), (1000, 3000)] and live.peak == 5000 and len(kept)


# -- how often a learner holds the features of a rollout ---------------------------------------------------------------


ENVS, DECISIONS, SIZE = 8, 16, 5_000
OBSERVATION = 4 * SIZE * ENVS  # bytes of the heavy feature of one observation of all environments


class Heavy(GaussianPolicy):
    """Its features hold ``SIZE`` numbers an environment, like a prefix; nothing else of the run is as large."""

    def encode(self, obs):
        features = super().encode(obs)
        return {**features, "prefix": features["state"][:, :1] * torch.ones(SIZE)}


@pytest.mark.parametrize(("micro_batch", "copies"), [(8, 1.2), (0, 2.1)])
def test_an_iteration_of_ppo_holds_features_once(micro_batch, copies):
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
