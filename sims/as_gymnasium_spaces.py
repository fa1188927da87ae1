"""What of our environments Gymnasium sees: observations as one space, actions within [-1, 1] or as indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

from vla_rl.contract.env import PRIVILEGED, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.spec import ArraySpec, EnvSpec


class ObservationView:
    """Observations as Gymnasium's.

    Parts: "state", "images/CAMERA", "task" (the index of the instruction, where there are several) and the extras by
    their names; ``privileged/*`` only when asked for.  The space is a Dict of the parts, or the part itself when there
    is one only.  Single numbers have shape (1,), and numbers are clipped to the declared bounds, which they may miss by
    rounding.
    """

    def __init__(self, spec: EnvSpec, privileged: bool) -> None:
        """Raises UserError when nothing of the environment can be seen."""
        self._parts: dict[str, tuple[Space[Any], Callable[[Observation], np.ndarray]]] = {}
        if spec.state.shape[0]:
            self._parts["state"] = _box(spec.state), lambda obs: _within(obs.state, spec.state)
        for name, image in spec.images.items():
            self._parts[f"images/{name}"] = _box(image), _image(name)
        if len(spec.tasks) > 1:
            self._parts["task"] = Discrete(len(spec.tasks)), lambda obs: obs.task.copy()
        for name, extra in spec.extras.items():
            if privileged or not name.startswith(PRIVILEGED):
                self._parts[name] = _box(extra), _extra(name, extra)
        if not self._parts:
            raise UserError(
                f"{spec.name!r} has neither state nor images to show, so Gymnasium's learners would see nothing; ask "
                "for privileged=True or for images."
            )
        self._alone = len(self._parts) == 1
        spaces = {name: space for name, (space, _) in self._parts.items()}
        self.space: Space[Any] = next(iter(spaces.values())) if self._alone else Dict(spaces)

    def __call__(self, obs: Observation) -> Any:
        """The observations of all environments, [E,...]."""
        parts = {name: get(obs) for name, (_, get) in self._parts.items()}
        return next(iter(parts.values())) if self._alone else parts

    def row(self, obs: Observation, env_id: int) -> Any:
        """The observation of environment ``env_id``."""
        whole = self(obs.select(np.array([env_id])))
        return whole[0] if self._alone else {name: part[0] for name, part in whole.items()}


class ActionScale:
    """Actions as Gymnasium's: a Box within [-1, 1], or in physical units; Discrete or MultiDiscrete for indices."""

    def __init__(self, spec: EnvSpec, rescale: bool) -> None:
        low, high = (np.broadcast_to(np.asarray(b), spec.action.shape) for b in (spec.action.low, spec.action.high))
        self._shape = spec.action.shape
        self._offset, self._scale = np.zeros_like(low), np.ones_like(high)
        if spec.discrete:
            self.space: Space[Any] = MultiDiscrete(high - low + 1, start=low)
            if spec.action_dim == 1:
                self.space = Discrete(int(high[0] - low[0] + 1), start=int(low[0]))
        elif rescale:
            self._offset, self._scale = (low + high) / 2, (high - low) / 2
            self.space = Box(-1.0, 1.0, spec.action.shape, np.float32)
        else:
            self.space = Box(low.astype(np.float32), high.astype(np.float32))

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Our actions [E,D] for Gymnasium's ``actions`` [E,...]."""
        physical: np.ndarray = self._offset + self._scale * actions.reshape(len(actions), *self._shape)
        return physical


def _box(spec: ArraySpec) -> Box:
    dtype = np.dtype(np.uint8 if spec.dtype == "bool" else spec.dtype)
    shape = spec.shape or (1,)
    low, high = (np.broadcast_to(np.asarray(bound, dtype), shape) for bound in (spec.low, spec.high))
    return Box(low, high, dtype=dtype.type)


def _within(values: np.ndarray, spec: ArraySpec) -> np.ndarray:
    """A copy of ``values`` [E,...] within the declared bounds; single numbers as [E,1]."""
    shaped = values.reshape(len(values), *(spec.shape or (1,)))
    if spec.dtype == "bool":
        return shaped.astype(np.uint8)
    clipped: np.ndarray = np.clip(shaped, np.asarray(spec.low, shaped.dtype), np.asarray(spec.high, shaped.dtype))
    return clipped


def _image(name: str) -> Callable[[Observation], np.ndarray]:
    return lambda obs: obs.images[name].copy()


def _extra(name: str, spec: ArraySpec) -> Callable[[Observation], np.ndarray]:
    return lambda obs: _within(obs.extras[name], spec)
