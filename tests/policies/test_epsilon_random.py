"""``EpsilonRandomPolicy`` acts randomly in the given share of decisions, for whole chunks, within the bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sims.catalog import make
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import UserError
from vla_rl.policies.epsilon_random import EpsilonRandomPolicy
from vla_rl.policies.feed_forward import CategoricalConfig, CategoricalPolicy
from vla_rl.policies.function import FunctionPolicy


def still(obs):
    return np.zeros((len(obs.time), 3, 2), np.float32)


@pytest.fixture
def env():
    return make("point_mass", num_envs=400)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_it_acts_randomly_in_a_share_of_its_decisions(env, share):
    policy = EpsilonRandomPolicy(FunctionPolicy(env.spec, still), env.spec, share)
    check_policy(policy, env, torch.Generator().manual_seed(0))
    features = policy.encode(env.reset(np.arange(400), np.arange(400)))
    action = policy.act(features, {}, "sample", torch.Generator().manual_seed(1))[0].action
    slipped = (action != 0).any(-1)
    assert (slipped.all(1) == slipped.any(1)).all() and abs(slipped.any(1).float().mean() - share) < 0.08
    assert (action == action[:, :1]).all()
    if share == 1.0:
        low, high = (torch.as_tensor(bound) for bound in (env.spec.action.low, env.spec.action.high))
        assert (action.amin((0, 1)) < low + 0.1 * (high - low)).all()
        assert (action.amax((0, 1)) > high - 0.1 * (high - low)).all()


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_one(env, share):
    with pytest.raises(UserError, match="from 0 to 1"):
        EpsilonRandomPolicy(FunctionPolicy(env.spec, still), env.spec, share)


def test_random_decisions_among_indices_are_whole_and_equally_likely():
    """Catch: left, stay, right; of those that are not drawn, the policy's own stay."""
    env = make("gym", num_envs=900, id="sims.catch:vla_rl/Catch-v0")
    torch.manual_seed(0)
    base = CategoricalPolicy(env.spec, config=CategoricalConfig(cameras=("image",)))
    features = base.encode(env.reset(np.arange(900), np.arange(900)))
    own = torch.as_tensor(base.act(features, {}, "eval", None)[0].action)
    for share in (1.0, 0.5):
        policy = EpsilonRandomPolicy(base, env.spec, share)
        action = policy.act(features, {}, "eval", torch.Generator().manual_seed(1))[0].action
        drawn = torch.bincount(action.long().ravel(), minlength=3)
        assert torch.equal(action.float(), action.float().round()) and action.min() >= 0 and action.max() <= 2
        assert abs((action == own).float().mean() - (1.0 - share * 2 / 3)) < 0.06
        if share == 1.0:
            assert (drawn.float() / 900 - 1 / 3).abs().max() < 0.06
