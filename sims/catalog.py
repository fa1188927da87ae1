"""The environments by name: strings that are imported only when one is made."""

from __future__ import annotations

from typing import Any

from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load

CATALOG: dict[str, str] = {
    "lift": "sims.mujoco.tasks.lift:make",
    "place": "sims.mujoco.tasks.place:make",
    "push": "sims.mujoco.tasks.push:make",
    "mixed": "sims.mujoco.tasks.mixed:make",
    "gym": "sims.gym:make",
    "counting": "sims.toy.counting:make",
    "point_mass": "sims.toy.point_mass:make",
}


def make(name: str, **options: Any) -> Any:
    """Make the environment ``name`` of the catalogue with its own ``options`` (``num_envs`` is one of them)."""
    if name not in CATALOG:
        raise UserError(f"no environment is called {name!r}, so nothing can be made; {did_you_mean(name, CATALOG)}")
    return load(CATALOG[name])(**options)
