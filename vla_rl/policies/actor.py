"""A policy that is trained from nothing, for continuous and for discrete actions."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.contract.limits import check_positive, check_sizes
from vla_rl.contract.spec import EnvSpec
from vla_rl.policies.categorical import CategoricalConfig, CategoricalPolicy
from vla_rl.policies.gaussian import GaussianConfig, GaussianPolicy
from vla_rl.policies.likelihood_parts import LogprobPer
from vla_rl.policies.normalization import Affine
from vla_rl.policies.observations import Activation
from vla_rl.policies.statistics import RunningStatistics


@dataclass(frozen=True)
class ActorConfig:
    """A Gaussian policy where actions are continuous, a categorical one where they are discrete."""

    horizon: int = 1  # H: actions in a chunk
    width: int = 64
    depth: int = 2
    std: float = 0.5  # initial, of normalised continuous actions
    cameras: tuple[str, ...] = ()  # whose pixels the policy and its critic read
    logprob_per: LogprobPer = "chunk"  # or "action", "token" (an entry): what has a ratio of its own in PPO and GRPO
    activation: Activation = "tanh"  # or "elu", of the hidden layers

    def __post_init__(self) -> None:
        check_sizes(self, "horizon", "width", "depth")
        check_positive(self, "std")

    def build(self, spec: EnvSpec, proprioception: Affine | RunningStatistics) -> GaussianPolicy | CategoricalPolicy:
        """A new policy for ``spec``."""
        if spec.discrete:
            parts = self.horizon, self.width, self.depth, self.cameras, self.logprob_per, self.activation
            return CategoricalPolicy(spec, proprioception, CategoricalConfig(*parts))
        sizes = self.horizon, self.width, self.depth, self.std, self.cameras, self.logprob_per, self.activation
        return GaussianPolicy(spec, proprioception, GaussianConfig(*sizes))
