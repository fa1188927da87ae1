"""What imagined environments declare."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vla_rl.contract.spec import EnvSpec

if TYPE_CHECKING:
    from world_models.imagination_config import ImaginationConfig
    from world_models.model import WorldModel


def imagined_spec(model: WorldModel, config: ImaginationConfig) -> EnvSpec:
    """The spec of imagined environments: only its time limit changes when they are renewed.

    A rollout that begins at a keyframe, anywhere in an episode, goes on with that episode's clock.
    """
    longest = config.horizon + (model.spec.time_limit if config.keyframe_share else 0)
    return replace(
        model.spec,
        name=f"imagined {model.spec.name}",
        time_limit=longest,
        max_chunk=min(model.spec.max_chunk, config.reach),
        extras={},
        success="once",
        can_snapshot=True,
        device=str(model.device),
    )
