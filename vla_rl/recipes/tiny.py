"""TinyVLA from nothing: grounded on labelled scenes, or learnt from a dataset alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.tokens import Vocabulary
from vla_rl.recipes.context import CPU, generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitation import every
from vla_rl.recipes.progress import bar
from vla_rl.training.grounding import GroundingConfig, ground
from vla_rl.training.threads import alone


def new_tiny(spec: EnvSpec, episodes: Demonstrations, config: TinyConfig, seed: int) -> TinyVLA:
    """An untrained policy for ``spec``, on the host; its input statistics are those of the demonstrations."""
    torch.manual_seed(seed)  # module initialisation has no generator argument
    state = Affine.from_data(torch.as_tensor(episodes.state))
    return TinyVLA(spec, Vocabulary.from_texts(spec.tasks), state, config)


def grounded_tiny(
    env: EnvConfig,
    episodes: Demonstrations,
    tiny: TinyConfig,
    config: GroundingConfig,
    seed: int,
    device: torch.device = CPU,
) -> TinyVLA:
    """A new policy whose backbone has learnt to point at the named object, from the task's labelled scenes."""
    policy = new_tiny(env.spec(), episodes, tiny, seed).to(device)
    images, tasks, uv, _ = env.draw_scenes(config.scenes, seed_ranges.training_seeds(seed, "grounding")[0])
    tokens = policy.tokens[torch.as_tensor(tasks, device=device)]
    steps = config.fit.steps
    with bar("ground", steps) as update:
        report = every(
            25, steps, lambda step, info: update(step, f"points within {info['pointing_error']:.3f} half-widths")
        )
        shown, where = (torch.as_tensor(item, device=device) for item in (images, uv))
        with alone():
            ground(policy, shown, tokens, where, config, generator(seed, 1), report)
    return policy


@dataclass(frozen=True)
class TinyFromData(TinyConfig):
    """A TinyVLA that learns from a dataset alone (a ``NewPolicyConfig`` of ``imitate_dataset.py``)."""

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> TinyVLA:
        """The untrained policy; a checkpoint of it holds a plain ``TinyConfig``."""
        config = TinyConfig(**{item.name: getattr(self, item.name) for item in fields(TinyConfig)})
        return new_tiny(spec, episodes, config, seed)
