"""Masses and friction of every simulation of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mujoco
import numpy as np
from mujoco.batch import Batch


class Physics:
    """Sets the parameters ``PHYSICS`` (``parameters.py``) of single simulations of ``batch``.

    The fields become per-simulation ones when this object is made; with nominal values the physics stays the same, bit
    for bit.
    """

    def __init__(self, batch: Batch, model: mujoco.MjModel, movable: Sequence[int]) -> None:
        """``movable``: ids of the bodies whose mass varies."""
        self._batch, self._model, self._movable = batch, model, np.asarray(movable, np.intp)
        self._mass, self._inertia = batch.expand("body_mass"), batch.expand("body_inertia")
        self._friction = batch.expand("geom_friction")

    def set(self, env_ids: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """The physics of ``env_ids`` [R] from ``values`` {name: [R]}."""
        if not env_ids.size:
            return
        bodies, mass = np.ix_(env_ids, self._movable), values["object_mass"]
        self._mass[bodies] = self._model.body_mass[self._movable] * mass[:, None]
        self._inertia[bodies] = self._model.body_inertia[self._movable] * mass[:, None, None]
        self._friction[env_ids] = self._model.geom_friction * values["friction"][:, None, None]
        self._batch.set_const(env_ids)
