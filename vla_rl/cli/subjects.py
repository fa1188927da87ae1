"""What is trained on top of a frozen imitation policy."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.cli.method import Setting
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual, ResidualConfig


@dataclass(frozen=True)
class TD3Residual:
    """A deterministic correction at every step, for off-policy algorithms."""

    residual: ResidualConfig = ResidualConfig()

    def build(self, setting: Setting) -> DeterministicResidual:
        return DeterministicResidual(setting.base, config=self.residual)


@dataclass(frozen=True)
class PPOResidual:
    """A Gaussian correction at every step, for on-policy algorithms."""

    residual: ResidualConfig = ResidualConfig()

    def build(self, setting: Setting) -> GaussianResidual:
        return GaussianResidual(setting.base, config=self.residual)
