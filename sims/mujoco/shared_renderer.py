"""Pictures of simulators that somebody else wrote on MuJoCo, by one OpenGL context for all that look alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from sims.mujoco.canvas import Canvas

_MAX_GEOMS = 4000
_BOTTOM_UP = np.s_[::-1]  # OpenGL's first row is the lowest


class SharedRenderer:
    """Renders models that have the same meshes and textures, which are uploaded once, whatever their poses and sizes.

    A context for each of 32 environments would hold 32 copies of them.
    """

    def __init__(self, model: Any, height: int, width: int, hidden_groups: Sequence[int] = ()) -> None:
        """``model`` lends meshes and textures; ``hidden_groups`` are groups of geoms that are not drawn."""
        simplify(model)
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        self._canvas = Canvas(model)
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[list(hidden_groups)] = 0
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._buffer = np.empty((height, width, 3), np.uint8)

    def render(self, model: Any, data: Any, camera: str) -> np.ndarray:
        """uint8 [h,w,3]: what ``camera`` sees."""
        self._canvas.gl.make_current()
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED.value
        view.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._option, None, view, everything, self._scene)
        mujoco.mjr_render(self._rect, self._scene, self._canvas.context)
        mujoco.mjr_readPixels(self._buffer, None, self._rect, self._canvas.context)
        return self._buffer[_BOTTOM_UP].copy()

    def close(self) -> None:
        """Free the OpenGL context; safe to call twice."""
        self._canvas.close()


def simplify(model: Any) -> None:
    """No shadows, no multisampling and coarse spheres: six times as fast on a processor (MuJoCo's default is 9/s)."""
    quality = model.vis.quality
    quality.shadowsize = quality.offsamples = 0
    quality.numslices = quality.numstacks = 8
    quality.numquads = 1
