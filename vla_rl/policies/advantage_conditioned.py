"""A flow policy that is conditioned on whether a decision was good, and acts as if the next one were (RECAP)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.contract.config import Checked, at_least, from_json, to_json
from vla_rl.contract.env import EnvSpec, Observation
from vla_rl.contract.load import name_of
from vla_rl.contract.policy import Features, require
from vla_rl.policies.flow import Field, FlowSampler, VelocityField, imitation_losses
from vla_rl.policies.flow_policy import FlowPolicy
from vla_rl.policies.pretrained import load_policy, read_config
from vla_rl.pretrained import load_weights, save_folder

INDICATOR = "indicator"  # among the features that are imitated, int [B]
NEGATIVE, POSITIVE, UNKNOWN = range(3)


@dataclass(frozen=True)
class AdvantageConfig(Checked):
    """How strongly the policy prefers good decisions when it acts.

    guidance  beta: 0 is the policy of all data, 1 the one of good decisions; above 1 it sharpens further (SOP acts with
              1 while it collects and with 1.5 to 2.5 in evaluation)
    """

    horizon: int
    sampler: FlowSampler
    guidance: float = at_least(1.0, 0)


class AdvantageConditioned(FlowPolicy):
    """``base`` with a learnt vector for "good", "bad" or "not said" added to what conditions it.

    It acts by classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598), as RECAP does (Physical Intelligence
    2025, pi*0.6, arXiv 2511.14759):

        v = v_unknown + beta (v_good - v_unknown)

    which aims at ``p(a|o) p(good|a,o)^beta``: exactly for beta 0 and 1, up to the difference between the noise levels
    otherwise.  beta = 1 and 0 need one pass of the network, others two.  The vectors are 0 at first, so the policy
    begins as its base, which is trained with them.

    Deviation: the paper writes the indicator into the prompt; a small policy whose words are those of its tasks has a
    vector instead.
    """

    config: AdvantageConfig

    def __init__(self, base: Any, config: AdvantageConfig | None = None) -> None:
        """``config`` None: the base's chunks and sampler, guidance 1.

        ``base``: a flow policy such as ``TinyVLA`` whose field depends on the observation through one vector,
        ``condition(features)`` [B,condition_size], as ``conditioned_field(condition)`` says.

        Raises UserError for a policy without one vector that conditions its field.
        """
        cure = "so it cannot be told how good a decision was; use a TinyVLA, or add them."
        require(base, "RECAP", ("condition", "conditioned_field", "condition_size"), cure)
        config = config or AdvantageConfig(base.config.horizon, base.config.sampler)
        super().__init__(base.spec, base.action_scale, config)
        self.base = base
        self.indicators = nn.Embedding(3, base.condition_size)
        nn.init.zeros_(self.indicators.weight)

    @property
    def feature_sizes(self) -> dict[str, int]:
        return self.base.feature_sizes

    def encode(self, obs: Observation) -> Features:
        return self.base.encode(obs)

    # -- acting -----------------------------------------------------------------------------------------------------

    def field(self, features: Features) -> VelocityField:
        condition, beta = self.base.condition(features), self.config.guidance
        good, unknown = (self._indicated(condition, value) for value in (POSITIVE, UNKNOWN))
        if beta in (0.0, 1.0):
            return good if beta else unknown

        def guided(x: Tensor, t: Tensor) -> Field:
            free, wanted = unknown(x, t), good(x, t)
            return Field(free.velocity + beta * (wanted.velocity - free.velocity), wanted.log_std)

        return guided

    def _indicated(self, condition: Tensor, indicator: int | Tensor) -> VelocityField:
        return self.base.conditioned_field(condition + self.indicators.weight[indicator])

    # -- learning ---------------------------------------------------------------------------------------------------

    def indicated_field(self, features: Features) -> VelocityField:
        """The field given ``features["indicator"]`` int [B]; demonstrations, which have none, are good decisions."""
        return self._indicated(self.base.condition(features), features.get(INDICATOR, POSITIVE))

    def imitation_losses(self, features: Features, chunks: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Flow matching of every action of ``chunks`` given their indicators, [B,H]."""
        return imitation_losses(self.indicated_field, features, chunks, draws, generator)

    def trainable(self) -> dict[str, nn.Parameter]:
        base = {f"base.{name}": parameter for name, parameter in self.base.trainable().items()}
        return {**base, **dict(self.indicators.named_parameters("indicators"))}

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, the vectors, and the base with its present weights in ``base``."""
        kind = name_of(type(self))
        config = {"policy": kind, "config": to_json(self.config), "spec": self.spec.to_json()}
        save_folder(Path(folder), config, {"weight": self.indicators.weight}, {"base": self.base})

    @classmethod
    def from_pretrained(cls, folder: str | Path, spec: EnvSpec | None = None) -> AdvantageConditioned:
        """Load a checkpoint; with ``spec``, the base checks that it was trained for such an environment."""
        saved: dict[str, Any] = read_config(Path(folder))
        policy = cls(load_policy(Path(folder) / "base", spec), from_json(saved["config"]))
        load_weights(policy.indicators, Path(folder))
        return policy.eval()
