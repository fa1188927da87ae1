"""What a rollout keeps of the small VLA's decision is one thing: the sample is the end of the recorded chain."""

from __future__ import annotations

import torch

from sims.catalog import make
from vla_rl.policies.flow import AllSteps, FlowSampler
from vla_rl.policies.flow_schedules import FlowSde
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.tokens import Vocabulary


def test_the_sample_is_the_end_of_the_chain():
    env = make("counting", num_envs=3)
    torch.manual_seed(0)
    config = TinyConfig(horizon=2, width=32, blocks=1, sampler=FlowSampler(FlowSde(0.5), AllSteps(), 4))
    policy = TinyVLA(env.spec, Vocabulary.from_texts(env.spec.tasks), Affine.from_bounds(env.spec.state), config)
    features = policy.encode(env.reset([0, 1, 2], [1, 2, 3]))
    out, _ = policy.act(features, {}, "sample", torch.Generator().manual_seed(0))
    assert torch.equal(out.sample.flatten(1), out.aux["points"][:, -1])
    assert not torch.equal(out.aux["points"][:, 0], out.aux["points"][:, -1])
