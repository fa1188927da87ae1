"""One size for the pictures of all cameras: what a world model predicts, whatever the cameras themselves have.

A model predicts all cameras at once, in one tensor.  So each camera's picture is resized to the canvas, grey ones are
repeated in three colours, and predictions are resized back to what policies expect.  Where sizes are equal already, no
pixel changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError

Sides = tuple[int, int]
Pixels = TypeVar("Pixels", np.ndarray, Tensor)
_AT_ONCE = 4096  # pictures that are resized together


@dataclass(frozen=True)
class Canvas:
    """The ``cameras`` of an environment, {name: (h, w, c)} in the order of their names, and the common ``sides``."""

    cameras: Mapping[str, tuple[int, int, int]]
    sides: Sides

    @classmethod
    def of(cls, spec: EnvSpec, sides: Sides | None, multiple: int) -> Canvas:
        """Of the cameras of ``spec``; without ``sides`` those of the largest camera, rounded up to ``multiple``.

        Raises UserError without a camera, for pictures of other than one or three colours, and for ``sides`` that the
        backbone cannot fold.
        """
        if not spec.images:
            raise UserError(
                f"{spec.name!r} has no camera, so there is nothing to imagine; make the environment with one (its "
                "'render' or 'cameras' option), or train in it directly with vla-rl train."
            )
        cameras = {name: (*spec.images[name].shape,) for name in sorted(spec.images)}
        odd = {name: shape for name, shape in cameras.items() if shape[2] not in (1, 3)}
        if odd:
            raise UserError(
                f"the pictures {odd} of {spec.name!r} have neither one nor three colours, so no world model can "
                "predict them; give pictures [h,w,3] or [h,w,1]."
            )
        if sides is None:
            largest = max(cameras.values(), key=lambda shape: shape[0] * shape[1])
            sides = (-(-largest[0] // multiple) * multiple, -(-largest[1] // multiple) * multiple)
        if any(side < multiple or side % multiple for side in sides):
            raise UserError(
                f"pictures of {sides[0]} x {sides[1]} pixels do not divide into the model's cells of {multiple}, so "
                f"they cannot be predicted; choose multiples of {multiple}."
            )
        return cls(cameras, sides)  # type: ignore[arg-type]  # shapes of pictures have three entries

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, h, w) of all cameras together."""
        return (3 * len(self.cameras), *self.sides)

    def stack(self, images: Mapping[str, Any]) -> Any:
        """Pictures uint8 [...,C,h,w] of ``images`` {camera: uint8 [...,h_i,w_i,c_i]}, tensors or arrays."""
        parts = [self._onto(images[name], name) for name in self.cameras]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts, -1).movedim(-1, -3).contiguous()
        return np.moveaxis(np.concatenate(parts, -1), -1, -3)

    def split(self, pictures: Tensor) -> dict[str, Tensor]:
        """Images {camera: uint8 [E,h_i,w_i,c_i]} of ``pictures`` uint8 [E,C,h,w]."""
        found = {}
        for (name, (height, width, colours)), part in zip(self.cameras.items(), pictures.split(3, 1), strict=True):
            whole = resized(part.movedim(1, -1), (height, width))
            found[name] = whole if colours == 3 else whole[..., :1]
        return found

    def fit(self, images: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """``images`` {camera: uint8 [M,h_i,w_i,c_i]} as {camera: uint8 [M,h,w,3]} at this canvas' size."""
        return {name: self._onto(images[name], name) for name in self.cameras}

    def _onto(self, image: Pixels, name: str) -> Pixels:
        found = resized(image, self.sides)
        if self.cameras[name][2] == 3:
            return found
        return found.repeat_interleave(3, -1) if isinstance(found, Tensor) else found.repeat(3, -1)


def resized(image: Pixels, sides: Sides) -> Pixels:
    """``image`` uint8 [...,h,w,c] at ``sides``: as it is if it has them already, else bilinear with antialias."""
    if tuple(image.shape[-3:-1]) == sides:
        return image
    if isinstance(image, np.ndarray):
        flat = image.reshape(-1, *image.shape[-3:])
        made = np.empty((len(flat), *sides, image.shape[-1]), np.uint8)
        for first in range(0, len(flat), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            made[part] = resized(torch.from_numpy(np.ascontiguousarray(flat[part])), sides).numpy()
        return made.reshape(*image.shape[:-3], *sides, image.shape[-1])
    flat = image.flatten(0, -4) if image.ndim > 3 else image[None]
    found = functional.interpolate(flat.movedim(-1, 1).float(), sides, mode="bilinear", antialias=True)
    return found.round().clamp(0, 255).to(torch.uint8).movedim(1, -1).reshape(*image.shape[:-3], *sides, -1)
