"""Functions of an observation as policies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from sims.toy.point_mass import optimal_action, optimal_return
from tests.auditing import PrivilegedEnv
from tests.residuals import COUNTING, biased_base
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.feed_forward import CategoricalConfig, CategoricalPolicy
from vla_rl.policies.function import EpsilonRandomPolicy, FunctionPolicy
from vla_rl.policies.pretrained import load_policy

ENV = make("point_mass", num_envs=5)


def test_it_plays_as_the_function_would():
    env = make("point_mass", num_envs=5)
    policy = FunctionPolicy(ENV.spec, lambda obs: optimal_action(obs)[:, None])
    rollout = RolloutSource(env, policy, 16, SeedStream(0, 100), torch.Generator()).next()
    np.testing.assert_allclose(rollout.reward.sum((0, 2)), optimal_return(rollout.features["state"][0]), rtol=1e-5)
    torch.testing.assert_close(rollout.executed, 0.2 * rollout.sample)
    assert rollout.success[-1].all() and not rollout.logprob.any()


def test_it_keeps_the_contract_and_sees_all_that_may_be_seen():
    assert check_policy(biased_base(), ENV, torch.Generator())
    observed = []

    def watching(obs):
        observed.append((sorted(obs.images), sorted(obs.extras), obs.time.tolist(), obs.state[:, 1].tolist()))
        assert np.array_equal(obs.images["audit"][:, 0, 0, 0], obs.time) and np.array_equal(
            obs.extras["force"], obs.state[:, 1:2]
        )
        return np.stack([obs.time + 1, obs.state[:, 0]], -1)[:, None]

    env = PrivilegedEnv(3)
    RolloutSource(env, FunctionPolicy(env.spec, watching), 20, SeedStream(300, 400), torch.Generator()).next()
    assert len(observed) == 20 and all(line[:2] == (["audit"], ["force"]) and line[2] == line[3] for line in observed)


def test_what_is_chosen_stays_within_the_bounds():
    obs = ENV.reset(np.arange(5), np.arange(5))

    def act(function):
        policy = FunctionPolicy(ENV.spec, function)
        return policy.act(policy.encode(obs), {}, "eval", None)[0]

    assert act(lambda obs: np.full((5, 3, 2), 9.0)).action.unique().tolist() == [pytest.approx(0.2)]
    for shape in ((5, 2), (4, 1, 2), (5, 1, 3)):
        with pytest.raises(ContractError, match=r"chose actions of shape .*nothing was executed; return \[5,H,2\]"):
            act(lambda obs, shape=shape: np.zeros(shape))


def test_a_checkpoint_finds_the_function_again(tmp_path):
    biased_base().save_pretrained(tmp_path / "it")
    restored = load_policy(tmp_path / "it", ENV.spec)
    obs = ENV.reset(np.arange(5), np.arange(5))
    one, two = (policy.act(policy.encode(obs), {}, "eval", None)[0] for policy in (biased_base(), restored))
    assert torch.equal(one.action, two.action) and one.action.shape == (5, 4, 2)
    assert load_policy(tmp_path / "it").spec == ENV.spec
    for other in (COUNTING, replace(ENV.spec, control_dt=0.2)):
        with pytest.raises(ContractError, match="was trained for"):
            load_policy(tmp_path / "it", other)
    with pytest.raises(UserError, match="given without a name"):
        FunctionPolicy(ENV.spec, lambda obs: obs.state).save_pretrained(tmp_path / "none")


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


def test_random_indices_are_whole_and_equally_likely():
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
