"""The smallest SmolVLA, pi0 and pi0.5 of random weights, for ``test_tiny.SPEC`` and environments no larger.

OpenVLA's is in ``openvla/tiny.py``, and a network that is no public family's in ``toy_network.py``.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from tests.policies.test_tiny import SPEC
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pi0.network import Gemma, Pi0Shape, Siglip
from vla_rl.policies.pi0.policy import Pi0
from vla_rl.policies.pi05.network import Pi05Shape
from vla_rl.policies.pi05.policy import Pi05
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape, TextShape, VisionShape
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions

STATE = Affine((0.1, 0.0, -0.1), (0.5, 1.0, 2.0))
SMOLVLA = SmolVLAShape(
    vision=VisionShape(16, 1, 2, 24, image_size=16, patch_size=4),
    text=TextShape(1, 24, 2, 6, num_key_value_heads=2, head_dim=4, intermediate_size=32),
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
PI05 = Pi05Shape(**vars(PI0))
SHAPES = {SmolVLA: SMOLVLA, Pi0: PI0, Pi05: PI05}
V = TypeVar("V", bound=FlowVLA)


def tiny_vla(family: type[V], options: VLAOptions | None = None) -> V:
    """With larger weights than those of an initialization, with which hardly anything is attended to."""
    torch.manual_seed(0)
    policy = family.new(SPEC, STATE, SHAPES[family], options)
    for parameter in [*policy.network.parameters(), *policy.noise_head.parameters()]:
        torch.nn.init.normal_(parameter, std=0.3)
    return policy
