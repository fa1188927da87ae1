"""Pictures of all worlds at once by MuJoCo-Warp's ray caster, which runs on processors and on any CUDA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco_warp as mjw
import torch
import warp as wp
from torch import Tensor

from sims.warp.worlds import Worlds


class Cameras:
    """Square uint8 pictures by some cameras of every world.

    The colours of the ``painted`` geoms and the positions of the ``placed`` ones, which are fixed to the world, differ
    between worlds.  No shadows, no antialiasing: as ``sims.mujoco.render`` draws, but edges may differ by a pixel.
    """

    def __init__(
        self, worlds: Worlds, names: Sequence[str], size: int, painted: Sequence[int], placed: Sequence[int]
    ) -> None:
        """``size`` in pixels; ``painted`` and ``placed`` are ids of geoms."""
        self._worlds, self._names, self._size = worlds, tuple(names), size
        with wp.ScopedDevice(str(worlds.device)):
            self._context: Any = mjw.create_render_context(
                worlds.host,
                nworld=worlds.num_envs,
                cam_res=(size, size),
                render_rgb=True,
                render_depth=False,
                render_seg=False,
                use_textures=False,
                cam_active=list(names),
                enable_specular=False,
                enable_emission=False,
            )
            packed = self._context.rgb_data  # uint32 [E,pixels of all cameras]
            self._bytes = wp.to_torch(
                wp.array(ptr=packed.ptr, dtype=wp.uint8, shape=(*packed.shape, 4), device=packed.device)
            )
        self._rgba, self._geoms = wp.to_torch(worlds.model.geom_rgba), wp.to_torch(worlds.data.geom_xpos)
        geoms = (torch.tensor(ids, dtype=torch.int64, device=worlds.device) for ids in (painted, placed))
        self._painted, self._placed = geoms

    def pictures(self, rgba: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """{camera: uint8 [E,size,size,3]} of the present state.

        ``rgba`` [E,painted,4]; ``positions`` [E,placed,3] in metres.
        """
        self._rgba[:, self._painted] = rgba
        self._geoms[:, self._placed] = positions.to(self._geoms.dtype)
        model, data = self._worlds.model, self._worlds.data
        with self._worlds.on_stream():
            mjw.kinematics(model, data)
            mjw.camlight(model, data)
            mjw.refit_bvh(model, data, self._context)
            mjw.render(model, data, self._context)
        bgra = self._bytes.reshape(self._worlds.num_envs, len(self._names), self._size, self._size, 4)
        return {name: bgra[:, i, ..., :3].flip(-1) for i, name in enumerate(self._names)}
