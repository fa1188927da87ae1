"""What holds of SmolVLA, pi0 and pi0.5 alike; ratios and densities of them are in ``test_likelihoods.py``."""

from __future__ import annotations

import pytest
import torch

from tests.policies.test_tiny import SPEC, observations
from tests.policies.vla.tiny_vlas import STATE, tiny_vla
from tests.toys import endless, seeded
from vla_rl.contract.env import Observation
from vla_rl.contract.policy import LikelihoodPolicy
from vla_rl.policies.pi0.policy import Pi0
from vla_rl.policies.pi05.policy import NUMBERS, Pi05
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.training.fit import FitConfig, ImitationConfig, imitate

FAMILIES = pytest.mark.parametrize("kind", [SmolVLA, Pi0, Pi05])


@FAMILIES
def test_a_new_one_is_small_and_has_a_likelihood(kind):
    policy = kind.new(SPEC, STATE)
    assert isinstance(policy, LikelihoodPolicy)
    assert sum(item.numel() for item in policy.parameters()) < 3_000_000
    assert policy.feature_sizes == {"pooled": policy.network.pooled_size, "state": 3}
    words = policy.network.shape.text.vocab_size if kind is SmolVLA else policy.network.shape.language.vocab_size
    written = NUMBERS + 1 if kind is Pi05 else 0  # and what is behind them
    assert words == 1 + len({word for task in SPEC.tasks for word in task.split()}) + written


@pytest.mark.full
@FAMILIES
def test_from_nothing_it_imitates(kind):
    """Chunks that follow from the state are learnt by the expert alone."""
    policy, obs = tiny_vla(kind), observations()
    features = policy.imitation_features(obs)
    chunks = features["state"][:, None, :2].expand(-1, 3, -1).contiguous()
    before, expert = distance(policy, obs, chunks), {f"network.{name}" for name in policy.network.expert_parameters()}
    frozen = {name: item.clone() for name, item in policy.named_parameters() if name.startswith("network.model.v")}
    imitate(policy, endless(features, chunks), ImitationConfig(fit=FitConfig(steps=150, batch=16, lr=5e-3)), seeded())
    assert distance(policy, obs, chunks) < 0.5 * before
    for name, item in policy.named_parameters():
        assert name not in frozen or name in expert or torch.equal(item, frozen[name])


def distance(policy: FlowVLA, obs: Observation, chunks: torch.Tensor) -> float:
    sample = policy.act(policy.encode(obs), {}, "eval", seeded(3))[0].sample
    return float((sample - chunks[:, : sample.shape[1]]).square().mean())
