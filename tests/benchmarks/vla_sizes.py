"""Vision-language-action policies of random weights, and made-up observations and rollouts for them.

Speed depends on neither weights nor rewards, so nothing is downloaded and no simulator runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vla_rl.contract.batch import Rollout
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.policies.normalization import Affine
from vla_rl.policies.smolvla.shape import SmolVLAShape, TextShape, VisionShape
from vla_rl.policies.vla.flow_vla import FlowVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.tokenizer import Vocabulary, WordPrompts

# The published SmolVLA in layers, heads, patches and chunk, with widths of a quarter: 24M parameters.
QUARTER = SmolVLAShape(
    vision=VisionShape(192, num_attention_heads=3, intermediate_size=768),
    text=TextShape(12320, 240, head_dim=16, intermediate_size=640),
    expert_width=180,
)
TINY = SmolVLAShape(
    vision=VisionShape(48, 2, 2, 96, image_size=32, patch_size=8),
    text=TextShape(64, 48, 4, 6, num_key_value_heads=2, head_dim=8, intermediate_size=80),
    pixel_shuffle=2,
    expert_width=36,
    expert_layers=4,
    chunk=10,
    action_size=8,
    state_size=8,
    picture=(32, 32),
)


@dataclass(frozen=True)
class Scene:
    """What a made-up robot sees: ``cameras`` pictures of ``side`` pixels a side and ``words`` words of a prompt."""

    cameras: int = 2
    side: int = 256
    words: int = 48
    state: int = 8
    action: int = 7

    def spec(self, chunk: int) -> EnvSpec:
        """The environment, which executes chunks of ``chunk`` actions."""
        picture = ArraySpec((self.side, self.side, 3), "uint8", 0, 255)
        return EnvSpec(
            name="made up",
            images={f"camera{i}": picture for i in range(self.cameras)},
            state=ArraySpec((self.state,), "float32", -1.0, 1.0),
            action=ArraySpec((self.action,), "float32", -1.0, 1.0),
            tasks=(" ".join(f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(self.words)),),
            control_dt=0.05,
            time_limit=1000,
            max_chunk=chunk,
        )

    def observe(self, count: int, seed: int = 0) -> Observation:
        """``count`` observations of noise."""
        draw = np.random.default_rng(seed)
        names = self.spec(1).images
        pictures = {name: draw.integers(0, 256, (count, self.side, self.side, 3), np.uint8) for name in names}
        state = draw.uniform(-1.0, 1.0, (count, self.state)).astype(np.float32)
        return Observation(pictures, state, np.zeros(count, np.int64), np.zeros(count, np.int64))


def policy_of(shape: Any, scene: Scene, options: VLAOptions, device: str = "cpu") -> FlowVLA:
    """A policy of random weights around the network of ``shape``, built on ``device``."""
    torch.manual_seed(0)
    spec = scene.spec(shape.chunk)
    with torch.device(device):
        network = shape.build()
    unit = Affine.from_bounds
    prompts = WordPrompts(Vocabulary.from_texts(spec.tasks))
    whole = replace(options, horizon=options.horizon or shape.chunk)
    policy = FlowVLA(spec, network, prompts, unit(spec.state), unit(spec.action), tuple(spec.images), whole)
    return policy.to(device).eval()


def rollout_of(policy: FlowVLA, scene: Scene, decisions: int, num_envs: int, seed: int = 0) -> Rollout:
    """What ``policy`` decided in ``decisions`` made-up moments of ``num_envs`` environments, with random rewards."""
    generator = torch.Generator().manual_seed(seed)
    features, outs = [], []
    for moment in range(decisions + 1):
        features.append(policy.encode(scene.observe(num_envs, seed + moment)))
        if moment < decisions:
            outs.append(policy.act(features[-1], {}, "sample", generator)[0])
    device, steps = policy.action_low.device, (decisions, num_envs, policy.horizon)
    no = torch.zeros(decisions, num_envs, dtype=torch.bool, device=device)
    none = torch.zeros(steps, dtype=torch.bool, device=device)
    return Rollout(
        features={name: torch.stack([item[name] for item in features]) for name in features[0]},
        sample=torch.stack([out.sample for out in outs]),
        executed=torch.stack([out.action for out in outs]),
        aux={name: torch.stack([out.aux[name] for out in outs]) for name in outs[0].aux},
        logprob=torch.stack([out.logprob for out in outs]),
        reward=torch.rand(steps, generator=generator).to(device),
        valid=~none,
        intervened=none,
        terminated=no,
        truncated=no,
        success=no,
        version=no.long(),
        final_index=torch.zeros(0, 2, dtype=torch.long, device=device),
        final_features={name: item[:0] for name, item in features[0].items()},
        seeds=no.long(),
    )


def parameters_of(policy: FlowVLA) -> int:
    """Numbers in the network."""
    return sum(item.numel() for item in policy.network.parameters())
