"""Headless rendering of the states of many environments with EGL or, where that fails, OSMesa."""

from __future__ import annotations

import atexit
import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np

from sims.mujoco.looks import Looks
from vla_rl.contract.errors import UserError, did_you_mean

BACKENDS = ("egl", "osmesa")
_ANY = ("enable", "enabled", "on", "true", "1")
_CURE = (
    "install it with 'apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6', or make the environment with "
    "render=False"
)
_PROBE = (
    "import sys; from sims.mujoco.render import _open_context; context = _open_context(sys.argv[1]); "
    "import mujoco; m = mujoco.MjModel.from_xml_string('<mujoco/>'); mujoco.MjrContext(m, 150).free(); "
    "sys.stdout.write('works'); sys.stdout.flush(); import os; os._exit(0)"
)

# Software rendering of small pictures is about twice as fast on the calling thread as on Mesa's own pool.
os.environ.setdefault("LP_NUM_THREADS", "0")


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


class Canvas:
    """An OpenGL context with MuJoCo's resources for one model, freed once: by ``close`` or when Python exits."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self.gl = open_context()
        self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self.context)
        # Registered after the backend's own exit handler, so it runs before the backend is gone.
        atexit.register(self.close)

    def close(self) -> None:
        if self.gl is not None:
            atexit.unregister(self.close)
            self.gl.make_current()
            self.context.free()
            self.gl.free()
            self.gl = None


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


def open_context() -> Any:
    """An OpenGL context from ``MUJOCO_GL`` if that is set, else from the first backend that works."""
    wanted = os.environ.get("MUJOCO_GL", "").lower().strip()
    wanted = "" if wanted in _ANY else wanted
    if wanted and wanted not in BACKENDS:
        raise UserError(
            f"MUJOCO_GL={wanted!r} cannot render without a display, so there are no images; "
            f"{did_you_mean(wanted, BACKENDS)}"
        )
    reasons = []
    for backend in (wanted,) if wanted else BACKENDS:
        try:
            return _open_context(backend)
        except Exception as error:  # PyOpenGL fails in many ways; each one is a reason to try the next backend
            reasons.append(f"{backend}: {error}")
            _forget_opengl()
    raise UserError(f"no OpenGL works here ({'; '.join(reasons)}), so no images can be rendered; {_CURE}.")


def _open_context(backend: str) -> Any:
    # The size is that of a window surface we never draw to; pictures go to an offscreen buffer.
    context = importlib.import_module(f"mujoco.{backend}").GLContext(8, 8)
    context.make_current()
    return context


def _forget_opengl() -> None:
    """Forget imported modules: PyOpenGL binds to one platform at import, so the next one needs a new import."""
    os.environ.pop("PYOPENGL_PLATFORM", None)
    stale = [name for name in sys.modules if name.split(".")[0] == "OpenGL" or name in ("mujoco.egl", "mujoco.osmesa")]
    for name in stale:
        del sys.modules[name]


def available_backends() -> dict[str, str]:
    """{backend: "works" or the error}, each backend tried in a process of its own."""
    return {backend: _probe(backend) for backend in BACKENDS}


def _probe(backend: str) -> str:
    # MUJOCO_GL=disable keeps `import mujoco` itself from loading the backend under test.
    environment = {**os.environ, "MUJOCO_GL": "disable"}
    environment.pop("PYOPENGL_PLATFORM", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, backend], env=environment, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return "did not answer within 60 s"
    if done.returncode == 0 and done.stdout == "works":
        return "works"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exited with {done.returncode}"
