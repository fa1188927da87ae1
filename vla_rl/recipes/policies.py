"""What is trained on top of a frozen imitation policy."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vla_rl.contract.load import load
from vla_rl.policies.diffusion import DiffusionConfig, DiffusionPolicy
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.latent_noise import GaussianLatent, LatentConfig, SquashedLatent, SquashedLatentConfig
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual, ResidualConfig
from vla_rl.policies.squashed import SquashedConfig, SquashedPolicy
from vla_rl.recipes.stages import imitate_policy
from vla_rl.recipes.trainers import RunContext
from vla_rl.training.imitation import ImitationConfig


@dataclass(frozen=True)
class TD3Residual:
    """A deterministic correction at every step, for off-policy algorithms.

    ``function``, "module:function" of an observation, is the base instead of the imitation policy if given; the
    residual still sees with the imitation policy's eyes.
    """

    residual: ResidualConfig = ResidualConfig()
    function: str = ""

    def build(self, context: RunContext) -> DeterministicResidual:
        if not self.function:
            return DeterministicResidual(context.base, config=self.residual)
        base = FunctionPolicy(context.base.spec, load(self.function), self.function)
        return DeterministicResidual(base, context.base, self.residual)


@dataclass(frozen=True)
class PPOResidual:
    """A Gaussian correction at every step, for on-policy algorithms."""

    residual: ResidualConfig = ResidualConfig()

    def build(self, context: RunContext) -> GaussianResidual:
        return GaussianResidual(context.base, config=self.residual)


@dataclass(frozen=True)
class Diffusion:
    """A diffusion policy that imitates the demonstrations, seeing with the imitation policy's eyes."""

    diffusion: DiffusionConfig = DiffusionConfig()
    imitation: ImitationConfig = field(default_factory=ImitationConfig)

    def build(self, context: RunContext) -> DiffusionPolicy:
        episodes = context.episodes("a diffusion policy that imitates first")
        torch.manual_seed(context.seed)
        policy = DiffusionPolicy(context.base, self.diffusion)
        imitate_policy(policy, episodes, self.imitation, context.seed)
        return policy


@dataclass(frozen=True)
class SquashedActor:
    """A new policy that sees what the imitation policy sees and knows nothing of its actions: SAC and its kin."""

    squashed: SquashedConfig = SquashedConfig()

    def build(self, context: RunContext) -> SquashedPolicy:
        return SquashedPolicy(context.base, self.squashed)


@dataclass(frozen=True)
class SACLatent:
    """The noise of the flow within bounds, for off-policy algorithms."""

    latent: SquashedLatentConfig = SquashedLatentConfig()

    def build(self, context: RunContext) -> SquashedLatent:
        return SquashedLatent(context.base, self.latent)


@dataclass(frozen=True)
class PPOLatent:
    """The noise of the flow, Gaussian, for on-policy algorithms; GoRL changes the flow as well."""

    latent: LatentConfig = LatentConfig()

    def build(self, context: RunContext) -> GaussianLatent:
        return GaussianLatent(context.base, self.latent)
