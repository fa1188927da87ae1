"""A Gaussian around the output of a policy that has no density, such as OpenVLA-OFT's L1 regression.

    a ~ N(f(o), diag(std^2)),    f(o): the normalised chunk that the policy predicts, trained along; std: learnt

What is deployed is ``f(o)``, as before, so PPO and GRPO begin at the policy that imitation made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vla_rl.contract.config import Checked, above_zero, check_choice, from_json, to_json
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import Features, require
from vla_rl.policies.feed_forward import GaussianChunks, LogprobPer, sum_per
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import load_weights, save_folder


@dataclass(frozen=True)
class AroundConfig(Checked):
    """How much it explores at first, and what has a ratio of its own; UserError for a std that is not above 0."""

    std: float = above_zero(0.1)  # initial, of every number of a normalised chunk
    logprob_per: LogprobPer = "chunk"  # or "action", "token": what has a ratio of its own in PPO and GRPO

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "logprob_per", "chunk", "action", "token")


class GaussianAround(GaussianChunks):
    """A ``LikelihoodPolicy`` around ``base``, whose weights it trains; mode "eval" is what ``base`` predicts.

    ``base`` has ``predicted(features)``: the normalised actions [B,H,D] that it executes, with gradient.  Raises
    UserError for one that has not.
    """

    def __init__(self, base: Any, config: AroundConfig | None = None) -> None:
        super().__init__()
        otherwise = "so there is nothing that a Gaussian could lie around; use a policy with an L1 regression head."
        require(base, type(self).__name__, ("predicted", "trainable", "feature_sizes"), otherwise)
        self.base, self.config, self.version = base, config or AroundConfig(), 0
        self.spec, self.action_scale = base.spec, base.action_scale
        start = torch.full((self.horizon * self.spec.action_dim,), math.log(self.config.std))
        self.log_std = nn.Parameter(start)
        self.set_limits(self.spec)

    @property
    def horizon(self) -> int:
        return int(self.base.horizon)

    @property
    def feature_sizes(self) -> dict[str, int]:
        return dict(self.base.feature_sizes)

    @torch.no_grad()
    def encode(self, obs: Observation) -> Features:
        features: Features = self.base.encode(obs)
        return features

    def mean(self, features: Features) -> Tensor:
        """The normalised actions that ``base`` predicts, side by side [B,H*D]."""
        found: Tensor = self.base.predicted(features)
        return found.flatten(1)

    def chunked(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (self.horizon, self.spec.action_dim))

    def logprob(self, terms: Tensor) -> Tensor:
        return sum_per(terms, self.horizon, self.config.logprob_per)

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Those of ``base``; ``std`` is not imitated."""
        losses: Tensor = self.base.imitation_losses(features, chunks, draws, generator)
        return losses

    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights of ``base`` that it trains itself, and the logarithm of ``std``."""
        inside = {f"base.{name}": item for name, item in self.base.trainable().items()}
        return {**inside, "log_std": self.log_std}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, ``model.safetensors`` (``log_std``) and the checkpoint of ``base`` in ``base/``."""
        config = {"policy": name_of(type(self)), "config": to_json(self.config), "spec": self.spec.to_json()}
        save_folder(Path(folder), config, {"log_std": self.log_std.detach()}, {"base": self.base})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> Self:
        """Load a checkpoint; with ``spec``, ``base`` checks that it was trained for such an environment."""
        saved = read_config(Path(folder))
        policy = cls(load_policy(Path(folder) / "base", spec), from_json(saved["config"]))
        load_weights(nn.ParameterDict({"log_std": policy.log_std}), Path(folder))  # in place
        return policy.eval()
