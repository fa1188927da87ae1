"""The tabletop's cameras, light and mat in Genesis, where MuJoCo's scene has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.mujoco.task import Task

_BACKGROUND, _MAT = (0.80, 0.83, 0.86), (0.86, 0.85, 0.81)
_AMBIENT, _DIFFUSE, _DIRECTION = (0.45, 0.45, 0.45), (1.0, 1.0, 0.96), (0.25, 0.4, -1.0)
_STRENGTH = 2.5  # of the light: colours come out about as bright as MuJoCo's
_MAT_SIZE = (0.29, 0.29, 0.0008)  # metres
_NEAR, _FAR = 0.02, 6.0  # metres


class Cameras:
    """Pictures of all environments of one scene, of ``size`` x ``size`` pixels.

    On a GPU Genesis' batch renderer makes them at once and they stay there; it needs CUDA.  On the processor its
    rasterizer draws one environment after the other with OpenGL (EGL or OSMesa), which takes as long as that sounds.
    """

    def __init__(self, genesis: Any, names: Sequence[str], size: int) -> None:
        self._genesis, self._names, self._size = genesis, tuple(names), size
        self._batched = genesis.backend == genesis.cuda
        self._cameras: dict[str, Any] = {}

    def options(self) -> dict[str, Any]:
        """What the scene has to be made with."""
        gs = self._genesis
        if not self._names:
            return {}
        light = {"type": "directional", "dir": _DIRECTION, "color": _DIFFUSE, "intensity": _STRENGTH}
        look = gs.options.VisOptions(
            shadow=False, split_envs=True, background_color=_BACKGROUND, ambient_light=_AMBIENT, lights=[light]
        )
        renderer = gs.renderers.BatchRenderer() if self._batched else gs.renderers.Rasterizer()
        return {"vis_options": look, "renderer": renderer}

    def add(self, scene: Any, task: Task) -> None:
        """Add what is seen only, and the cameras, to a ``scene`` that is not built yet."""
        if not self._names:
            return
        gs = self._genesis
        mat = gs.morphs.Box(size=_MAT_SIZE, fixed=True, collision=False)
        scene.add_entity(mat, surface=gs.surfaces.Rough(color=_MAT))
        if self._batched:
            scene.add_light((-0.3, -0.5, 1.2), _DIRECTION, _DIFFUSE, _STRENGTH, directional=True, castshadow=False)
        for name in self._names:
            camera = task.model.camera(name)
            _, up, backward = camera.mat0.reshape(3, 3).T
            self._cameras[name] = scene.add_camera(
                res=(self._size, self._size),
                pos=tuple(camera.pos),
                lookat=tuple(camera.pos - backward),
                up=tuple(up),
                fov=float(camera.fovy[0]),
                near=_NEAR,
                far=_FAR,
            )

    def render(self) -> dict[str, Tensor]:
        """{camera: uint8 [E,h,w,3]} of what the scene holds."""
        pictures: dict[str, Tensor] = {}
        for name, camera in self._cameras.items():  # the first takes over what was written to the simulator
            picture = camera.render(force_render=not pictures)[0]
            if not isinstance(picture, Tensor):  # of one environment: no axis for it, and a view that is upside down
                picture = torch.from_numpy(np.ascontiguousarray(picture))
            pictures[name] = picture[..., :3].reshape(-1, self._size, self._size, 3)
        return pictures
