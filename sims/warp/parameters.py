"""What an episode on MuJoCo-Warp can vary: what does not change how the renderer was compiled."""

from __future__ import annotations

from typing import Any

from sims.mujoco.parameters import LOOKS, PHYSICS, POSES
from vla_rl.contract.task import Parameter

PARAMETERS = (*POSES, *(item for item in LOOKS if item.name in ("object_hue", "object_saturation")), *PHYSICS)


def parameters(**options: Any) -> tuple[Parameter, ...]:
    """What every task can vary, whatever its ``options``; cameras, lights and the table stay as they are."""
    return PARAMETERS
