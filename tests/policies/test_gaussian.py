"""The Gaussian policy: its density is that of torch, its samples are raw, its checkpoints are faithful."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import LikelihoodPolicy
from vla_rl.policies.critics import RunningCritic
from vla_rl.policies.feed_forward import ActorConfig, GaussianConfig, GaussianPolicy
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy

BATCH = 16
ENV = make("point_mass", num_envs=BATCH)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(horizon: int = 3, std: float = 1.5) -> GaussianPolicy:
    torch.manual_seed(0)
    policy = GaussianPolicy(ENV.spec, config=GaussianConfig(horizon, width=16, std=std))
    torch.nn.init.normal_(policy.network[-1].weight, std=0.5)
    torch.nn.init.normal_(policy.log_std, std=0.3)
    return policy


def features(policy):
    return policy.encode(ENV.reset(np.arange(BATCH), np.arange(BATCH)))


@pytest.mark.parametrize(("activation", "expected"), [("tanh", torch.nn.Tanh), ("elu", torch.nn.ELU)])
def test_hidden_layers_of_policy_and_critic_have_the_activation_that_is_asked_for(activation, expected):
    policy = ActorConfig(width=8, depth=3, activation=activation).build(ENV.spec, Affine((0.0, 0.0), (1.0, 1.0)))
    critic = RunningCritic({"state": 2}, 8, 3, activation=activation)
    for layers in (list(policy.network)[:-1], list(critic.body)):
        assert [type(layer) for layer in layers] == [torch.nn.Linear, expected] * 3


def test_an_unknown_activation_is_refused():
    with pytest.raises(UserError, match="activation is 'relu', which has no meaning; choose 'tanh' or 'elu'"):
        GaussianConfig(activation="relu")


def test_samples_have_the_declared_mean_and_std_and_are_not_clipped():
    policy = made(horizon=1)
    kept = {"state": torch.zeros(1, 2).expand(40_000, 2)}
    out, _ = policy.act(kept, {}, "sample", seeded(2))
    mean, std = policy.mean(kept)[0], policy.log_std.exp()
    torch.testing.assert_close(out.sample[:, 0].mean(0), mean, rtol=0, atol=0.05)
    torch.testing.assert_close(out.sample[:, 0].std(0), std, rtol=0.02, atol=0)
    assert out.sample.abs().max() > 2 and out.action.abs().max() <= 0.2 + 1e-7
    torch.testing.assert_close(out.action, (out.sample * 0.2).clamp(-0.2, 0.2))


def test_what_is_deployed_is_the_mean():
    policy = made()
    kept = features(policy)
    out, _ = policy.act(kept, {}, "eval", None)
    torch.testing.assert_close(out.sample.flatten(1), policy.mean(kept))
    assert not out.logprob.any()


def test_it_keeps_the_contract():
    assert isinstance(made(), LikelihoodPolicy)
    assert len(check_policy(made(), ENV, seeded())) == 3


def test_all_weights_get_a_gradient():
    policy = made()
    kept = features(policy)
    out, _ = policy.act(kept, {}, "sample", seeded(1))
    policy.log_prob(kept, out.sample, {}).logprob.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.trainable().values())


def test_a_checkpoint_restores_the_same_policy(tmp_path):
    policy = GaussianPolicy(ENV.spec, Affine((0.1, 0.2), (0.5, 0.7)), GaussianConfig(2, depth=1, std=0.3))
    policy.save_pretrained(tmp_path / "it")
    restored = load_policy(tmp_path / "it")
    kept = features(policy)
    assert torch.equal(features(restored)["state"], kept["state"])
    one, two = (p.act(kept, {}, "sample", seeded(3))[0] for p in (policy, restored))
    assert torch.equal(one.action, two.action) and torch.equal(one.logprob, two.logprob)
    with pytest.raises(ContractError, match="control_dt"):
        GaussianPolicy.from_pretrained(tmp_path / "it", replace(ENV.spec, control_dt=0.2))
