"""Headless rendering of the states of many environments with EGL or, where that fails, OSMesa."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import mujoco
import numpy as np

from sims.mujoco.canvas import Canvas
from sims.mujoco.looks import Looks


class Renderer:
    """Renders states of one model into uint8 pictures with one camera-independent OpenGL context.

    Only kinematics are computed per state, with the poses of cameras and lights.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        height: int,
        width: int,
        painted: Sequence[int] = (),
        placed: Sequence[int] = (),
        surfaces: Sequence[int] = (),
    ) -> None:
        """``painted``, ``placed``: ids of the geoms whose colour, or position, differs between environments.

        ``surfaces``: ids of those whose brightness and texture ``looks`` vary.
        """
        self._model = model = copy.copy(model)  # colours, positions and buffer size are this renderer's own
        self._painted, self._placed = np.asarray(painted, dtype=np.intp), np.asarray(placed, dtype=np.intp)
        self._data = mujoco.MjData(model)
        mujoco.mj_forward(model, self._data)
        self._looks = Looks(model, surfaces)
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        self._canvas = Canvas(model)
        self._scene = mujoco.MjvScene(model, model.ngeom + 8)
        self._option = mujoco.MjvOption()
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._buffer = np.empty((height, width, 3), np.uint8)

    def render(
        self,
        qpos: np.ndarray,
        rgba: np.ndarray,
        positions: np.ndarray,
        camera: str,
        out: np.ndarray,
        looks: Sequence[Mapping[str, float]] = (),
    ) -> np.ndarray:
        """Render ``qpos`` [R,nq] into ``out`` uint8 [R,h,w,3]; returns ``out``.

        ``rgba`` [R,painted,4]: colours of the painted geoms; ``positions`` [R,placed,3]: positions (metres); ``looks``
        [R]: values of ``LOOKS`` (``parameters.py``).  Without them a row looks like the one before, at first nominal.
        """
        self._canvas.gl.make_current()
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED.value
        view.fixedcamid = self._model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        for i in range(len(qpos)):
            self._data.qpos[:] = qpos[i]
            self._model.geom_rgba[self._painted] = rgba[i]
            self._model.geom_pos[self._placed] = positions[i]
            if looks:
                self._looks.show(looks[i])
            mujoco.mj_kinematics(self._model, self._data)
            mujoco.mj_camlight(self._model, self._data)
            mujoco.mjv_updateScene(self._model, self._data, self._option, None, view, everything, self._scene)
            mujoco.mjr_render(self._rect, self._scene, self._canvas.context)
            mujoco.mjr_readPixels(self._buffer, None, self._rect, self._canvas.context)
            out[i] = self._buffer[::-1]
        return out

    def close(self) -> None:
        """Free the OpenGL context; safe to call twice."""
        self._canvas.close()

    def __del__(self) -> None:
        if hasattr(self, "_canvas"):
            self.close()


def project(model: mujoco.MjModel, camera: str, points: np.ndarray) -> np.ndarray:
    """Image coordinates of world ``points`` [...,3] (metres) in a square picture.

    Returns float32 [...,2]: u to the right and v downwards, both -1 to 1 from edge to edge.
    """
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    number = model.camera(camera).id
    local = (points - data.cam_xpos[number]) @ data.cam_xmat[number].reshape(3, 3)
    scale = -local[..., 2:] * np.tan(np.deg2rad(model.cam_fovy[number]) / 2)
    return (local[..., :2] * np.array([1.0, -1.0]) / scale).astype(np.float32)
