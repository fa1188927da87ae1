"""A classical controller for lift, without weights: find the named colour in the picture, go there, grasp, lift.

It has a policy's observations (camera "front", proprioception, the instruction), so residual policies can correct it:
``FunctionPolicy(spec, lift_vision.act, "sims.mujoco.tasks.lift_vision:act")``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sims.mujoco.scene import CUBE_EDGE
from sims.mujoco.tabletop import COLOURS
from sims.mujoco.tasks.lift_expert import LiftExpert
from vla_rl.contract.env import Observation

# Camera "front" of scene.py.
_CAMERA = np.array([0.0, -0.40, 0.42])
_RIGHT, _UP = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.67, 0.742])
_VIEW = np.cross(_UP, _RIGHT)
_HALF_HEIGHT = np.tan(np.radians(38.0) / 2)
_MIN_COSINE = 0.97  # smallest cosine between a pixel's chromaticity and the colour's
_PUSHED = 0.016  # metres
_HUES = np.array([rgba[:3] for rgba in COLOURS.values()], np.float64)


def act(obs: Observation, error: float = 0.0) -> np.ndarray:
    """The next five actions [E,5,4], in metres and grip sign; ``error`` in metres is added to the cube's x and y."""
    located = find(obs.images["front"], obs.task) + np.array([error, error, 0.0])
    # Closing fingers hide the cube, so it is assumed to be between them.
    closing = (obs.state[:, 7] < 0.01) & (obs.state[:, 3] > CUBE_EDGE / 2)
    cube = np.where(closing[:, None], obs.state[:, :3], located)
    return LiftExpert(horizon=5).act(replace(obs, extras={"privileged/target": cube.astype(np.float32)}))


def act_miscalibrated(obs: Observation) -> np.ndarray:
    """As :func:`act` after somebody has pushed the camera: it often closes its fingers beside the cube."""
    return act(obs, error=_PUSHED)


def find(images: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Position on the table [E,3], in metres, of the pixels of ``colour`` int [E] in ``images`` uint8 [E,h,w,3].

    The centre of the table where no pixel has that colour.
    """
    pixels = images.astype(np.float64) - images.mean(-1, keepdims=True)
    hues = _HUES[colour] - _HUES[colour].mean(-1, keepdims=True)
    size = np.linalg.norm(pixels, axis=-1)
    cosine = np.einsum("ehwc,ec->ehw", pixels, hues) / (np.linalg.norm(hues, axis=-1)[:, None, None] * size + 1e-6)
    weight = np.where((cosine > _MIN_COSINE) & (size > 25.0), 1.0, 0.0)
    height, width = weight.shape[1:]
    total = np.maximum(weight.sum((1, 2)), 1e-6)
    x = (weight.sum(1) @ (np.arange(width) + 0.5) / total) / height - 0.5 * width / height
    y = 0.5 - (weight.sum(2) @ (np.arange(height) + 0.5) / total) / height
    ray = _VIEW + 2 * _HALF_HEIGHT * (x[:, None] * _RIGHT + y[:, None] * _UP)
    place = _CAMERA + ray * ((CUBE_EDGE / 2 - _CAMERA[2]) / ray[:, 2])[:, None]
    return np.where((weight.sum((1, 2)) > 0)[:, None], place, np.array([0.0, 0.0, CUBE_EDGE / 2]))
