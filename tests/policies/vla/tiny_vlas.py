"""The smallest SmolVLA and pi0 of random weights, for ``test_tiny.SPEC`` and environments no larger.

OpenVLA's is in ``openvla/tiny.py``, and a network that is no public family's in ``toy_network.py``.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch

from tests.policies.test_tiny import SPEC, observations
from tests.toys import seeded
from vla_rl.policies.flow import AllSteps, FlowNoise, FlowSampler, FlowSde, LastStep, LastStepFromNoise, OneRandomStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pi0.network import Gemma, Pi0Shape, Siglip
from vla_rl.policies.pi0.policy import Pi0
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape, TextShape, VisionShape
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions

STATE = Affine((0.1, 0.0, -0.1), (0.5, 1.0, 2.0))
SMOLVLA = SmolVLAShape(
    vision=VisionShape(width=16, layers=1, heads=2, mlp=24, image=16, patch=4),
    text=TextShape(vocabulary=1, width=24, layers=2, heads=6, key_value_heads=2, head_size=4, mlp=32),
    pixel_shuffle=2,
    expert_width=18,
    expert_layers=2,
    chunk=3,
    action_size=3,
    state_size=4,
    picture=(16, 16),
)
PI0 = Pi0Shape(
    vision=Siglip(16, 24, 1, 2, patch_size=8, image_size=16),
    language=Gemma(24, 32, 2, 4, 1, head_dim=8, vocab_size=1),
    expert_hidden_size=16,
    expert_intermediate_size=24,
    chunk=3,
    action_size=3,
    state_size=4,
)
SHAPES = {SmolVLA: SMOLVLA, Pi0: PI0}
# A public family must know the density of its chains under all of them, whatever it keeps and computes in.
SAMPLERS = [
    FlowSampler(schedule, placement, 4)
    for schedule in (FlowSde(0.5), FlowNoise())
    for placement in (AllSteps(), OneRandomStep(), LastStep(), LastStepFromNoise())
]

V = TypeVar("V", bound=FlowVLA)


def tiny_vla(family: type[V], options: VLAOptions | None = None) -> V:
    """With larger weights than those of an initialization, with which hardly anything is attended to."""
    torch.manual_seed(0)
    policy = family.new(SPEC, STATE, SHAPES[family], options)
    for parameter in [*policy.network.parameters(), *policy.noise_head.parameters()]:
        torch.nn.init.normal_(parameter, std=0.3)
    return policy


def learning_sees_the_density_of_acting(policy: FlowVLA, dtype: torch.dtype) -> None:
    """That of the whole padded chain, whichever rows are asked together: within 1e-5 a root of terms, 1e-9 in fp64."""
    policy = policy.to(dtype)
    found = policy.encode(observations())
    features = {name: item.to(dtype) if item.is_floating_point() else item for name, item in found.items()}
    out, _ = policy.act(features, {}, "sample", seeded(1))
    numbers = math.prod(policy.latent_shape)
    terms = out.aux["noisy_steps"].shape[1] * numbers
    assert out.aux["points"].shape == (16, 5, numbers)
    limit = 1e-5 * math.sqrt(terms) if dtype == torch.float32 else 1e-9
    for rows in (slice(0, 1), slice(2, 9), slice(None)):
        again = policy.log_prob(
            {name: item[rows] for name, item in features.items()},
            out.sample[rows],
            {name: item[rows] for name, item in out.aux.items()},
        )
        assert (again.logprob - out.logprob[rows]).abs().max().item() <= limit
