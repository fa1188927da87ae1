"""A point mass that should come to the origin: state only, dense reward, known optimum."""

from __future__ import annotations

import numpy as np

from sims.base import NumpyEnv
from vla_rl.contract.env import ArraySpec, EnvSpec, Observation
from vla_rl.contract.task import declare_task

_LIMIT = 16  # actions per episode
_STRIDE = 0.2  # metres per action and axis
_EDGE = 1.0  # metres; positions are kept within


class PointMassEnv(NumpyEnv):
    """Kinematic point in the plane: an action displaces it, the reward is minus its distance to the origin.

    state   float32 [E,2]    position, metres
    action  float32 [E,H,2]  displacement, metres, within +-0.2 per axis

    ``success`` is latched when the point is within 5 cm at the time limit, where every episode is truncated or, on
    success, terminated.  :func:`optimal_action` is the best policy and :func:`optimal_return` its return.
    """

    def __init__(self, num_envs: int) -> None:
        super().__init__(spec(), num_envs, {"position": np.zeros((num_envs, 2), np.float64)})

    def _begin(self, env_id: int, seed: int) -> None:
        rng = np.random.Generator(np.random.PCG64(seed))
        self._task_state["position"][env_id] = rng.uniform(-_EDGE, _EDGE, 2)

    def _advance(self, env_ids: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        position = np.clip(self._task_state["position"][env_ids] + action, -_EDGE, _EDGE)
        self._task_state["position"][env_ids] = position
        distance = np.linalg.norm(position, axis=1)
        over, near = self._time[env_ids] >= _LIMIT, distance < 0.05
        return -distance.astype(np.float32), over & near, over & ~near

    def _state(self) -> np.ndarray:
        return self._task_state["position"].astype(np.float32)


def optimal_action(obs: Observation) -> np.ndarray:
    """float32 [E,2]: straight towards the origin on each axis, as far as the bounds allow."""
    return np.clip(-obs.state, -_STRIDE, _STRIDE).astype(np.float32)


def optimal_return(position: np.ndarray) -> np.ndarray:
    """float64 [...]: the greatest sum of rewards (discount 1) of an episode that starts at ``position`` [...,2].

    The axes are independent and every distance falls with both, so moving each axis by its bound is optimal.
    """
    steps = np.arange(1, _LIMIT + 1)[:, None]
    remaining = np.maximum(np.abs(np.asarray(position, np.float64))[..., None, :] - steps * _STRIDE, 0.0)
    return -np.linalg.norm(remaining, axis=-1).sum(axis=-1)


def spec() -> EnvSpec:
    """The spec of :func:`make`."""
    axes = ("x", "y")
    return EnvSpec(
        name="point_mass",
        images={},
        state=ArraySpec((2,), "float32", -_EDGE, _EDGE, unit="m", frame="world", names=axes),
        action=ArraySpec((2,), "float32", -_STRIDE, _STRIDE, unit="m", frame="world", names=axes),
        tasks=("go to the origin",),
        control_dt=0.1,
        time_limit=_LIMIT,
        max_chunk=_LIMIT,
        success="at_end",
        can_snapshot=True,
    )


@declare_task(spec=spec)
def make(num_envs: int) -> PointMassEnv:
    """The point-mass environment; it has no options."""
    return PointMassEnv(num_envs)
