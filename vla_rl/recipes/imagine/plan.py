"""The numbers of a world model's life: what it is trained on, how it is trained, trusted and used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.recipes.imagine.collect import CollectConfig
from vla_rl.training.coevolve import CoevolutionConfig
from vla_rl.training.fit import FitConfig
from vla_rl.training.world_model import WorldModelFit


def _short_fit() -> WorldModelFit:
    lr = 5e-4
    return WorldModelFit(
        FitConfig(300, 512, lr), FitConfig(30, 256, lr), FitConfig(60, 32, lr), FitConfig(600, 64, lr, 1e-2)
    )


@dataclass(frozen=True)
class Plan:
    """How a world model is trained, and how far it is trusted."""

    model: Any  # a ``world_models.config.WorldModelConfig``
    imagination: Any  # a ``world_models.imagination_config.ImaginationConfig``, with the longest horizon to trust
    keyframes: Any  # a ``world_models.keyframes.KeyframeConfig``
    collect: CollectConfig = field(default_factory=CollectConfig)
    init_from: str = ""  # a run whose collected episodes and first world model are taken; "" makes both
    demonstrations: str = ""  # folder of a dataset that the world model is trained on as well
    fit: WorldModelFit = field(default_factory=WorldModelFit)
    refit: WorldModelFit = field(default_factory=_short_fit)  # after episodes were bought
    trust: TrustConfig = field(default_factory=TrustConfig)
    initial_episodes: int = 500  # imagined rollouts begin in so many of the latest episodes
    coevolution: CoevolutionConfig = field(default_factory=CoevolutionConfig)
