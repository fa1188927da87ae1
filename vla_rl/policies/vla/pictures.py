"""Pictures as the vision towers of public checkpoints take them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def padded_picture(images: Tensor, size: tuple[int, int] | None) -> Tensor:
    """uint8 [B,h,w,3] as float32 [B,3,height,width] in [-1, 1], with ``size`` (width, height).

    As LeRobot prepares them for SmolVLA: scaled to fit without antialiasing, black added on the left and on top.
    None leaves the size as it is.
    """
    pictures = images.permute(0, 3, 1, 2).float() / 255.0
    if size is not None:
        width, height = size
        ratio = max(pictures.shape[3] / width, pictures.shape[2] / height)
        fitted = (int(pictures.shape[2] / ratio), int(pictures.shape[3] / ratio))
        pictures = functional.interpolate(pictures, size=fitted, mode="bilinear", align_corners=False)
        pictures = functional.pad(pictures, (width - fitted[1], 0, height - fitted[0], 0))
    return pictures * 2.0 - 1.0
