"""The cameras of simulators that somebody else wrote on MuJoCo: environments of one task share a renderer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class CameraRig:
    """Pictures of all tasks, by one renderer for each; MuJoCo is imported with the first picture."""

    def __init__(self, cameras: Sequence[str], size: int, hidden_groups: Sequence[int] = ()) -> None:
        """Pictures of ``size`` x ``size`` pixels; geoms of ``hidden_groups`` are not drawn."""
        self._cameras, self._size, self._hidden_groups = cameras, size, hidden_groups
        self._renderers: dict[str, Any] = {}

    def images(self, task: str, model: Any, data: Any) -> dict[str, np.ndarray]:
        """{camera: uint8 [h,w,3]} of an environment that plays ``task``."""
        if task not in self._renderers and self._cameras:
            from sims.mujoco.shared_renderer import SharedRenderer

            self._renderers[task] = SharedRenderer(model, self._size, self._size, self._hidden_groups)
        return {name: self._renderers[task].render(model, data, name) for name in self._cameras}
