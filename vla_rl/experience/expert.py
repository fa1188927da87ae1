"""Scripted experts as policies, so that they are recorded and evaluated like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vla_rl.contract.env import Array, Observation
from vla_rl.contract.policy import ActionOut, Features, Mode, State

_IMAGES, _EXTRAS = "images/", "extras/"


def features_of(obs: Observation) -> Features:
    """An observation as the features of a policy that encodes nothing."""
    features = {_IMAGES + name: image for name, image in obs.images.items()}
    features |= {_EXTRAS + name: extra for name, extra in obs.extras.items()}
    return features | {"state": obs.state, "task": obs.task, "time": obs.time}


def observation_of(features: Features) -> Observation:
    """The observation that :func:`features_of` made these of."""
    images, extras = (
        {name.removeprefix(kind): item for name, item in features.items() if name.startswith(kind)}
        for kind in (_IMAGES, _EXTRAS)
    )
    return Observation(images, features["state"], features["task"], features["time"], extras)


class ExpertPolicy:
    """``expert(obs) -> [E,H,D]`` in physical units, for instance the ``act`` of a scripted expert.

    It may read ``privileged/*``, so it can neither be trained nor deployed.  With ``horizon`` only that many actions of
    every chunk are executed.  It has no likelihood: ``sample`` is the action itself.
    """

    reads_privileged = True
    version = 0

    def __init__(self, expert: Callable[[Observation], np.ndarray], horizon: int | None = None) -> None:
        self.expert, self.horizon = expert, horizon

    def encode(self, obs: Observation) -> Features:
        return features_of(obs)

    def initial_state(self, num_envs: int) -> State:
        return {}

    def reset_state(self, state: State, env_ids: Array) -> State:
        return state

    def act(self, features: Features, state: State, mode: Mode, generator: Any) -> tuple[ActionOut, State]:
        action = self.expert(observation_of(features))[:, : self.horizon]
        return ActionOut(action, action, np.zeros(len(action), np.float32)), state
