"""Likelihoods per chunk, action and token: each part is torch's, and they sum to that of the chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributions import Categorical, Normal

from tests.token_toys import CHOICES, ENTRIES, HORIZON, PARTS, SPEC, seeded, token_policy
from vla_rl.contract.env import ArraySpec
from vla_rl.contract.errors import UserError
from vla_rl.policies.feed_forward import ActorConfig, CategoricalConfig, GaussianConfig, GaussianPolicy
from vla_rl.policies.pretrained import load_policy

REAL = replace(SPEC, action=ArraySpec((ENTRIES,), "float32", -1.0, 1.0))
FEATURES = {"state": torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]}
SHAPES = {"chunk": (), "action": (HORIZON,), "token": (HORIZON * ENTRIES,)}
EACH = pytest.mark.parametrize("logprob_per", PARTS)


def gaussian(logprob_per) -> GaussianPolicy:
    torch.manual_seed(0)
    policy = GaussianPolicy(REAL, config=GaussianConfig(HORIZON, 16, 1, logprob_per=logprob_per))
    torch.nn.init.normal_(policy.last.weight, std=0.5)
    return policy


def terms(policy, sample) -> torch.Tensor:
    """Torch's log-probs of every entry, [B,H*D]."""
    if isinstance(policy, GaussianPolicy):
        return Normal(policy.mean(FEATURES), policy.log_std.exp()).log_prob(sample.flatten(1))
    logits = policy.outputs(FEATURES).unflatten(-1, (-1, CHOICES))
    return Categorical(logits=logits).log_prob(sample.flatten(1))


@EACH
@pytest.mark.parametrize("made", [gaussian, lambda per: token_policy(per, 0.5)], ids=["gaussian", "categorical"])
def test_parts_are_those_of_torch_and_sum_to_the_chunk(made, logprob_per):
    policy = made(logprob_per).double()
    out, _ = policy.act(FEATURES, {}, "sample", seeded(1))
    found = policy.log_prob(FEATURES, out.sample, {})
    assert out.logprob.shape == (8, *SHAPES[logprob_per]) and torch.equal(out.logprob, found.logprob)
    expected = terms(policy, out.sample)
    per_part = expected.reshape(8, PARTS[logprob_per], -1).sum(-1).reshape(found.logprob.shape)
    torch.testing.assert_close(found.logprob, per_part, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.logprob.reshape(8, -1).sum(1), expected.sum(1), rtol=0, atol=1e-12)
    assert found.entropy.shape == policy.kl(found.params, found.params).shape == (8,)
    deployed, _ = policy.act(FEATURES, {}, "eval", None)
    assert deployed.logprob.shape == out.logprob.shape and not deployed.logprob.any()


def test_a_checkpoint_keeps_it_and_nonsense_is_refused(tmp_path):
    token_policy("action").save_pretrained(tmp_path / "saved")
    assert load_policy(tmp_path / "saved", SPEC).config.logprob_per == "action"
    for kind in (CategoricalConfig, GaussianConfig):
        with pytest.raises(UserError, match="logprob_per is 'word', which has no meaning; choose 'chunk' or 'action'"):
            kind(logprob_per="word")
    for spec in (SPEC, REAL):
        assert ActorConfig(logprob_per="token").build(spec, None).config.logprob_per == "token"
