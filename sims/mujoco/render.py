"""Headless rendering of the states of many environments, and how the scene of each looks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mujoco
import numpy as np
from array_api_compat import array_namespace

from sims.mujoco.canvas import Canvas, view_of
from sims.mujoco.scene import TEXTURES
from sims.mujoco.task import Constant, Task, TaskState
from vla_rl.contract.env import Array


class Renderer:
    """Renders states of one task into uint8 pictures with one camera-independent OpenGL context.

    Only kinematics are computed per state, with the poses of cameras and lights.
    """

    def __init__(self, task: Task, size: int) -> None:
        """Pictures of ``size`` x ``size`` pixels."""
        self._model = model = copy.copy(task.model)  # colours, positions and buffer size are this renderer's own
        self._painted, self._placed = (np.asarray(geoms, np.intp) for geoms in (task.painted, task.placed))
        self._data = mujoco.MjData(model)
        mujoco.mj_forward(model, self._data)
        self._looks = Looks(model, task.surfaces)
        # Textures are seen in varied looks alone, and Mesa takes 0.1 s for the first one of more than a pixel.
        sizes = model.tex_height.copy(), model.tex_width.copy()
        model.tex_height[:] = model.tex_width[:] = 1
        self._canvas, self._textured = Canvas(model, size, size), False
        model.tex_height[:], model.tex_width[:] = sizes

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
        [R]: values of ``LOOKS`` (``env.py``).  Without them a row looks like the one before, at first nominal.
        """
        self._canvas.gl.make_current()
        if looks and not self._textured:
            self._canvas.upload_textures(self._model)
            self._textured = True
        view = view_of(self._model, camera)
        for i in range(len(qpos)):
            self._data.qpos[:] = qpos[i]
            self._model.geom_rgba[self._painted] = rgba[i]
            self._model.geom_pos[self._placed] = positions[i]
            if looks:
                self._looks.show(looks[i])
            mujoco.mj_kinematics(self._model, self._data)
            mujoco.mj_camlight(self._model, self._data)
            out[i] = self._canvas.draw(self._model, self._data, view)
        return out

    def close(self) -> None:
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


_GREY = Constant(np.full(3, 1.0 / np.sqrt(3.0)))  # the axis of greys


class Scenes(NamedTuple):
    """``n`` labelled pictures.

    images  uint8 [n,size,size,3]
    tasks   int64 [n]      index into the environment's ``spec.tasks``
    uv      float32 [n,P,2]  the P positions that the instruction names: u right, v down, -1 to 1 from edge to edge
    state   float32 [n,S]  as the environment's ``state``
    """

    images: np.ndarray
    tasks: np.ndarray
    uv: np.ndarray
    state: np.ndarray


def labelled(
    task: Task, qpos: np.ndarray, ctrl: np.ndarray, task_state: TaskState, named: np.ndarray, size: int, camera: str
) -> Scenes:
    """Pictures of ``size`` pixels by ``camera`` of the states ``qpos`` [n,nq], ``ctrl`` [n,nu] and ``task_state``.

    ``named`` [n,P,3]: the positions that the instructions name, metres.
    """
    renderer = Renderer(task, size)
    out = np.empty((len(qpos), size, size, 3), np.uint8)
    images = renderer.render(qpos, task.colours(task_state), task.mark_positions(task_state), camera, out)
    renderer.close()
    uv = project(task.model, camera, named)
    return Scenes(images, task.instruction(task_state), uv, task.proprioception(qpos, ctrl))


class Looks:
    """Sets the parameters ``LOOKS`` (``env.py``) in a renderer's own ``model``, row by row."""

    def __init__(self, model: mujoco.MjModel, surfaces: Sequence[int]) -> None:
        """``surfaces``: ids of the geoms of the table."""
        self._model, self._surfaces = model, np.asarray(surfaces, np.intp)
        self._cam_pos, self._cam_quat = model.cam_pos.copy(), model.cam_quat.copy()
        self._cam_fovy, self._light_dir = model.cam_fovy.copy(), model.light_dir.copy()
        self._light_diffuse = model.light_diffuse.copy()
        head = model.vis.headlight
        self._head = {"ambient": head.ambient.copy(), "diffuse": head.diffuse.copy()}
        self._table = model.geom_rgba[self._surfaces]
        self._materials = [-1, *(model.material(name).id for name in TEXTURES)]

    def show(self, values: Mapping[str, float]) -> None:
        """Everything but the objects looks as ``values`` {name: value} say, until the next call."""
        model = self._model
        self._show_cameras(values)
        model.light_diffuse[:] = self._light_diffuse * values["light_brightness"]
        for part, nominal in self._head.items():
            getattr(model.vis.headlight, part)[:] = nominal * values["light_brightness"]
        cos, sin = np.cos(values["light_yaw"]), np.sin(values["light_yaw"])
        x, y = self._light_dir[:, 0], self._light_dir[:, 1]
        model.light_dir[:, 0], model.light_dir[:, 1] = cos * x - sin * y, sin * x + cos * y
        model.geom_rgba[self._surfaces, :3] = np.minimum(self._table[:, :3] * values["table_brightness"], 1.0)
        model.geom_matid[self._surfaces] = self._materials[int(values["table_texture"])]

    def _show_cameras(self, values: Mapping[str, float]) -> None:
        model = self._model
        shift = np.array([values[f"camera_{axis}"] for axis in "xyz"])
        turns = (("yaw", (0.0, 1.0, 0.0)), ("pitch", (1.0, 0.0, 0.0)), ("roll", (0.0, 0.0, 1.0)))
        moved, turn = np.empty(3), np.empty(4)
        for camera in range(model.ncam):
            mujoco.mju_rotVecQuat(moved, shift, self._cam_quat[camera])
            model.cam_pos[camera] = self._cam_pos[camera] + moved
            quaternion = self._cam_quat[camera].copy()
            for name, axis in turns:
                mujoco.mju_axisAngle2Quat(turn, np.array(axis), values[f"camera_{name}"])
                mujoco.mju_mulQuat(quaternion, quaternion.copy(), turn)
            model.cam_quat[camera] = quaternion
        model.cam_fovy[:] = self._cam_fovy + np.rad2deg(values["camera_fovy"])


def recolour(rgba: Array, hue: Array, saturation: Array) -> Array:
    """``rgba`` float32 [R,n,4] with the hues of row ``i`` turned by ``hue[i]`` radians and its saturation scaled.

    Hue is the angle of a colour about the grey axis, saturation its distance from it; results are clipped to [0, 1].
    """
    xp = array_namespace(rgba)
    rgb = xp.astype(rgba[..., :3], xp.float64)
    grey = xp.mean(rgb, axis=-1, keepdims=True)
    chroma = rgb - grey
    cos, sin = xp.cos(hue)[:, None, None], xp.sin(hue)[:, None, None]
    turned = chroma * cos + xp.linalg.cross(xp.broadcast_to(_GREY.beside(rgba), chroma.shape), chroma) * sin
    painted = xp.clip(grey + turned * saturation[:, None, None], 0.0, 1.0)
    return xp.concat([xp.astype(painted, rgba.dtype), rgba[..., 3:]], axis=-1)
