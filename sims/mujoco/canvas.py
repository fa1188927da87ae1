"""Headless OpenGL by EGL or, where that fails, OSMesa: for our tabletops and for simulators that others wrote."""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from vla_rl.contract.errors import UserError, did_you_mean

BACKENDS = ("egl", "osmesa")
_ANY = ("enable", "enabled", "on", "true", "1")
_CURE = (
    "install it with 'apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6', or make the environment with "
    "render=False"
)
_PROBE = (
    "import sys; from sims.mujoco.canvas import _open_context; context = _open_context(sys.argv[1]); "
    "import mujoco; m = mujoco.MjModel.from_xml_string('<mujoco/>'); mujoco.MjrContext(m, 150).free(); "
    "sys.stdout.write('works'); sys.stdout.flush(); import os; os._exit(0)"
)

# Software rendering of small pictures is about twice as fast on the calling thread as on Mesa's own pool.
os.environ.setdefault("LP_NUM_THREADS", "0")


class Canvas:
    """An OpenGL context with MuJoCo's resources for one model, freed once: by ``close`` or when Python exits.

    It draws any model that has the same meshes and textures, which are uploaded once, whatever poses and sizes these
    have; make the context ``gl`` current before.
    """

    def __init__(
        self, model: Any, height: int, width: int, geoms: int | None = None, hidden_groups: Sequence[int] = ()
    ) -> None:
        """Pictures of at most ``geoms`` geoms (None: those of ``model``), without those of ``hidden_groups``."""
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        self.gl = open_context()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene, self._option = mujoco.MjvScene(model, geoms or model.ngeom + 8), mujoco.MjvOption()
        self._option.geomgroup[list(hidden_groups)] = 0
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._buffer = np.empty((height, width, 3), np.uint8)
        # Registered after the backend's own exit handler, so it runs before the backend is gone.
        atexit.register(self.close)

    def upload_textures(self, model: Any) -> None:
        """Those of ``model``, which may have been smaller before; make the context ``gl`` current before."""
        for number in range(model.ntex):
            mujoco.mjr_uploadTexture(model, self._context, number)

    def draw(self, model: Any, data: Any, view: Any) -> np.ndarray:
        """uint8 [h,w,3]: what the camera ``view`` sees; the next picture overwrites it."""
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._option, None, view, everything, self._scene)
        mujoco.mjr_render(self._rect, self._scene, self._context)
        mujoco.mjr_readPixels(self._buffer, None, self._rect, self._context)
        return self._buffer[::-1]  # OpenGL's first row is the lowest

    def close(self) -> None:
        if self.gl is not None:
            atexit.unregister(self.close)
            self.gl.make_current()
            self._context.free()
            self.gl.free()
            self.gl = None


def view_of(model: Any, camera: str) -> mujoco.MjvCamera:
    """The ``camera`` of ``model`` as :meth:`Canvas.draw` takes it."""
    view = mujoco.MjvCamera()
    view.type = mujoco.mjtCamera.mjCAMERA_FIXED.value
    view.fixedcamid = model.camera(camera).id
    return view


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


def simplify(model: Any) -> None:
    """No shadows, no multisampling and coarse spheres: six times as fast on a processor (MuJoCo's default is 9/s)."""
    quality = model.vis.quality
    quality.shadowsize = quality.offsamples = 0
    quality.numslices = quality.numstacks = 8
    quality.numquads = 1
