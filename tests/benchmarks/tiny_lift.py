"""An untrained TinyVLA on lift, for benchmarks of what is around it."""

from __future__ import annotations

import torch

from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.env_config import EnvConfig


def tiny_on_lift(threads: int = 2) -> tuple[EnvConfig, TinyVLA]:
    """The environment and the same policy for it every time."""
    torch.manual_seed(0)
    env = EnvConfig("lift", options={"deadline": 25, "threads": threads})
    spec = env.spec()
    vocabulary, statistics = Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state)
    return env, TinyVLA(spec, vocabulary, statistics, TinyConfig(width=128, blocks=2))
