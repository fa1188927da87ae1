"""What openpi's clients send, as an observation of ours: the keys of its LIBERO policies, pictures of any size.

Source: github.com/Physical-Intelligence/openpi, ``src/openpi/policies/libero_policy.py`` (keys, float pictures,
channels first) and ``packages/openpi-client/src/openpi_client/image_tools.py`` (scaling without distortion).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.spec import EnvSpec
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.openpi import CAMERAS

_OVERSHOOT = 0.5  # beyond 0 and 1, of a picture that was scaled; others are in 0 to 255 or -1 to 1


class LiberoLayout:
    """Reads the keys ``observation/image``, ``observation/wrist_image``, ``observation/state`` and ``prompt``.

    The policy's cameras are taken in the spec's order, the scene first and then the wrist; other keys are ignored.
    Without a prompt, a policy that knows one instruction follows that.  Raises UserError for more than two cameras.
    """

    def __init__(self, spec: EnvSpec) -> None:
        if len(spec.images) > len(CAMERAS):
            raise UserError(
                f"the policy sees {len(spec.images)} cameras, but openpi's LIBERO keys have two, so requests could not "
                "be read; write a function and give --layout module:function."
            )
        self.keys = dict(zip(CAMERAS, spec.images, strict=False))
        self._only = spec.tasks[0] if len(spec.tasks) == 1 else None

    def __call__(self, request: Mapping[str, Any]) -> SingleObservation:
        """The observation in ``request``; raises ContractError where a key lacks or holds something else."""
        images = {camera: picture_of(_array(request, key)) for key, camera in self.keys.items()}
        words = request.get("prompt", self._only)
        if not isinstance(words, str):
            raise ContractError("the request has no text 'prompt', so the policy does not know what to do; send one.")
        return SingleObservation(images, _array(request, "observation/state"), words)


def picture_of(array: np.ndarray) -> np.ndarray:
    """uint8 [h,w,c] of a picture that may be float within [0, 1] or [c,h,w]; raises ContractError for others."""
    if array.ndim != 3 or not array.size:
        raise ContractError(f"the request has a picture of shape {list(array.shape)}, so it is refused; send [h,w,c].")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise ContractError("the request has a picture that is not finite, so it is refused; look at the camera.")
        low, high = float(array.min()), float(array.max())
        if not -_OVERSHOOT <= low <= high <= 1.0 + _OVERSHOOT:
            raise ContractError(
                f"the request has a picture of floats from {low:.3g} to {high:.3g}, so it is refused; send 0 to 1, or "
                "uint8."
            )
        array = (255 * np.clip(array, 0.0, 1.0)).astype(np.uint8)
    return np.moveaxis(array, 0, -1) if array.shape[0] == 3 != array.shape[-1] else array


def fitted(seen: SingleObservation, spec: EnvSpec) -> SingleObservation:
    """``seen`` with its RGB pictures in the sizes of ``spec``: scaled bilinearly, padded with black, undistorted.

    Pictures that have their size, and those that the spec does not know or that are no RGB, stay as they are.
    """
    images = {
        name: _fit(image, *spec.images[name].shape[:2]) if name in spec.images else image
        for name, image in seen.images.items()
    }
    return replace(seen, images=images)


def _fit(image: np.ndarray, height: int, width: int) -> np.ndarray:
    rgb = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3
    if not rgb or image.shape[:2] == (height, width) or not image.size:
        return image
    share = max(image.shape[0] / height, image.shape[1] / width)
    size = max(1, int(image.shape[0] / share)), max(1, int(image.shape[1] / share))
    scaled = Image.fromarray(np.ascontiguousarray(image)).resize(size[::-1], Image.Resampling.BILINEAR)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    padded = np.zeros((height, width, 3), np.uint8)
    padded[top : top + size[0], left : left + size[1]] = np.asarray(scaled)
    return padded


def _array(request: Mapping[str, Any], key: str) -> np.ndarray:
    found = request.get(key)
    if not isinstance(found, np.ndarray):
        raise ContractError(
            f"the request has no array {key!r} but {', '.join(map(repr, request)):.200}, so the policy cannot act; "
            "send it, or start the server with --layout module:function."
        )
    return found
