"""The cameras of simulators that somebody else wrote on MuJoCo: environments of one task share a renderer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np


class CameraRig:
    """Pictures of all tasks, by one renderer for each; MuJoCo is imported with the first picture.

    A renderer holds the meshes and textures of its task, so the one that was used longest ago is closed when there are
    more than ``most``.
    """

    def __init__(self, cameras: Sequence[str], size: int, most: int, hidden_groups: Sequence[int] = ()) -> None:
        """Pictures of ``size`` x ``size`` pixels; geoms of ``hidden_groups`` are not drawn."""
        self._cameras, self._size, self._most, self._hidden_groups = cameras, size, most, hidden_groups
        self._renderers: OrderedDict[str, Any] = OrderedDict()  # the one that was used longest ago first

    def images(self, task: str, model: Any, data: Any) -> dict[str, np.ndarray]:
        """{camera: uint8 [h,w,3]} of an environment that plays ``task``."""
        if not self._cameras:
            return {}
        renderer = self._renderer(task, model)
        return {name: renderer.render(model, data, name) for name in self._cameras}

    def close(self) -> None:
        """Close every renderer; safe to call twice."""
        while self._renderers:
            self._renderers.popitem()[1].close()

    def _renderer(self, task: str, model: Any) -> Any:
        if task not in self._renderers:
            from sims.mujoco.canvas import SharedRenderer

            if len(self._renderers) >= self._most:
                self._renderers.popitem(last=False)[1].close()
            self._renderers[task] = SharedRenderer(model, self._size, self._size, self._hidden_groups)
        self._renderers.move_to_end(task)
        return self._renderers[task]
