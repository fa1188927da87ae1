"""What an episode of Gymnasium's MuJoCo tasks can vary: masses, friction, damping and gravity of every environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from vla_rl.contract.parameter import Parameter

PHYSICS = (
    Parameter("mass", 1.0, 0.2, 3.0, "factor", "mass and inertia of every body"),
    Parameter("friction", 1.0, 0.1, 3.0, "factor", "friction of all contacts"),
    Parameter("damping", 1.0, 0.2, 3.0, "factor", "damping of every joint"),
    Parameter("gravity", 1.0, 0.5, 2.0, "factor", "gravity"),
)
_OURS = "gymnasium.envs.mujoco."


def physics_of(id: str) -> tuple[Parameter, ...]:
    """``PHYSICS`` where ``id`` is one of Gymnasium's own MuJoCo tasks, otherwise nothing."""
    return PHYSICS if str(gymnasium.spec(id).entry_point).startswith(_OURS) else ()


class ModelPhysics:
    """Sets ``PHYSICS`` in the model of one MuJoCo environment; nominal values leave it as it is, bit for bit."""

    def __init__(self, env: Any) -> None:
        """``env``: an environment with ``model`` and ``data``, without wrappers."""
        self._env, self._values = env, {parameter.name: parameter.nominal for parameter in PHYSICS}
        model = env.model
        fields = {"body_mass": "mass", "body_inertia": "mass", "geom_friction": "friction", "dof_damping": "damping"}
        self._nominal = {field: (name, getattr(model, field).copy()) for field, name in fields.items()}
        self._gravity = model.opt.gravity.copy()

    def set(self, values: Mapping[str, float]) -> None:
        """The physics of the episode that the next reset starts: {parameter: value}."""
        if values == self._values:
            return
        import mujoco

        model = self._env.model
        for field, (name, nominal) in self._nominal.items():
            getattr(model, field)[:] = nominal * values[name]
        model.opt.gravity[:] = self._gravity * values["gravity"]
        mujoco.mj_setConst(model, self._env.data)
        self._values = dict(values)
