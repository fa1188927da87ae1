"""What is trained on top of a frozen imitation policy."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.cli.method import Setting
from vla_rl.contract.load import load
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual, ResidualConfig
from vla_rl.policies.squashed import SquashedConfig, SquashedPolicy


@dataclass(frozen=True)
class TD3Residual:
    """A deterministic correction at every step, for off-policy algorithms.

    ``function``, "module:function" of an observation, is the base instead of the imitation policy if given; the
    residual still sees with the imitation policy's eyes.
    """

    residual: ResidualConfig = ResidualConfig()
    function: str = ""

    def build(self, setting: Setting) -> DeterministicResidual:
        if not self.function:
            return DeterministicResidual(setting.base, config=self.residual)
        base = FunctionPolicy(setting.base.spec, load(self.function), self.function)
        return DeterministicResidual(base, setting.base, self.residual)


@dataclass(frozen=True)
class PPOResidual:
    """A Gaussian correction at every step, for on-policy algorithms."""

    residual: ResidualConfig = ResidualConfig()

    def build(self, setting: Setting) -> GaussianResidual:
        return GaussianResidual(setting.base, config=self.residual)


@dataclass(frozen=True)
class SquashedSubject:
    """A new policy that sees what the imitation policy sees and knows nothing of its actions: SAC and its kin."""

    squashed: SquashedConfig = SquashedConfig()

    def build(self, setting: Setting) -> SquashedPolicy:
        return SquashedPolicy(setting.base, self.squashed)
