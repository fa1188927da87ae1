"""A new policy that has learnt to point at the object an instruction names, from a task's labelled scenes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from vla_rl.contract.spec import EnvSpec
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.recipes.context import CPU, generator
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitation import ImitatingPolicy, every
from vla_rl.recipes.progress import bar
from vla_rl.training.grounding import GroundingConfig
from vla_rl.training.threads import alone

Report: TypeAlias = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Scenes:
    """Labelled pictures, where the policy is.

    images  uint8 [N,h,w,3]
    tasks   int64 [N]         index of the instruction
    uv      float32 [N,P,2]   where the named objects are: x right, y down, in [-1,1]
    """

    images: Tensor
    tasks: Tensor
    uv: Tensor


class GroundedPolicyConfig(Protocol):
    """The frozen dataclass of an untrained policy whose perception is trained to point, before it imitates."""

    def build(self, spec: EnvSpec, episodes: Demonstrations, seed: int) -> ImitatingPolicy:
        """The policy for ``spec``, on the host; ``episodes`` give statistics of its inputs."""

    def ground(
        self, policy: object, scenes: Scenes, config: GroundingConfig, generator: torch.Generator, report: Report
    ) -> None:
        """Train the perception of what :meth:`build` returned; ``report(step, metrics)`` is called after every step."""


def grounded_policy(
    env: EnvConfig,
    episodes: Demonstrations,
    new: GroundedPolicyConfig,
    config: GroundingConfig,
    seed: int,
    device: torch.device = CPU,
) -> ImitatingPolicy:
    """The policy that ``new`` builds, grounded on scenes of ``env``."""
    policy = new.build(env.spec(), episodes, seed)
    policy = policy.to(device)  # type: ignore[attr-defined]  # a network
    images, tasks, uv, _ = env.draw_scenes(config.scenes, seed_ranges.training_seeds(seed, "grounding")[0])
    shown, named, where = (torch.as_tensor(item, device=device) for item in (images, tasks, uv))
    steps = config.fit.steps
    with bar("ground", steps) as update:
        report = every(
            25, steps, lambda step, info: update(step, f"points within {info['pointing_error']:.3f} half-widths")
        )
        with alone():
            new.ground(policy, Scenes(shown, named, where), config, generator(seed, 1), report)
    return policy
