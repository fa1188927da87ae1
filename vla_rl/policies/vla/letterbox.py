"""Pictures fitted into a square with bars beside them, as the libraries around pi0 do: each one differently.

A square picture of the right size is the same in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.nn import functional as F

_HALF = 127.5  # 0..255 to [-1, 1]


@dataclass(frozen=True)
class Letterbox:
    """LeRobot's (since 0.5) and openpi's in torch: bilinear without antialiasing, black bars around the picture.

    LeRobot 0.4's bars were -3: it filled them before it mapped [0, 1] to [-1, 1].  A folder does not say which version
    wrote it, and openpi, where the published weights come from, has always had black ones.
    """

    resample: str = "bilinear"
    antialias: bool = False
    before: float = 0.5  # share of the bars that is left of the picture, or above it
    bar: float = -1.0  # value of the bars, where black is -1 and white 1

    def __call__(self, picture: Tensor, side: int) -> Tensor:
        """uint8 [B,h,w,3] -> float32 [B,3,side,side], black -1 and white 1."""
        image = picture.permute(0, 3, 1, 2).float()
        if image.shape[2:] != (side, side):
            height, width = self.fitted(image.shape[2], image.shape[3], side)
            top, left = int(self.before * (side - height)), int(self.before * (side - width))
            bars = (left, side - width - left, top, side - height - top)
            image = F.pad(self.resized(image, height, width), bars, value=(self.bar + 1.0) * _HALF)
        return image / _HALF - 1.0

    def fitted(self, height: int, width: int, side: int) -> tuple[int, int]:
        """Height and width within the square."""
        ratio = max(width / side, height / side)
        return int(height / ratio), int(width / ratio)

    def resized(self, image: Tensor, height: int, width: int) -> Tensor:
        """[B,3,h,w] -> [B,3,height,width], both within 0..255."""
        options: dict[str, Any] = {"mode": self.resample, "antialias": self.antialias, "align_corners": False}
        return F.interpolate(image, size=(height, width), **options)


@dataclass(frozen=True)
class OpenpiLetterbox(Letterbox):
    """openpi's resize_with_pad (its client's, by Pillow): bilinear with antialiasing.

    Rows are rounded to 8 bits before columns are resized; Pillow's own weights have 8 bits too, which makes a
    difference of one level in some pixels.
    """

    antialias: bool = True

    def resized(self, image: Tensor, height: int, width: int) -> Tensor:
        wide = super().resized(image, image.shape[2], width).clamp(0.0, 255.0).round()
        return super().resized(wide, height, width).clamp(0.0, 255.0).round()


@dataclass(frozen=True)
class TransformersLetterbox(OpenpiLetterbox):
    """transformers' PI0ImageProcessor (5.23, by torchvision): bicubic, grey bars on the right and below.

    Its bars are zeros that are added after normalisation.  Its sizes are products, which rounding sometimes leaves one
    pixel shorter than the others' quotients (1280 x 720 becomes 224 x 125, not 224 x 126).
    """

    resample: str = "bicubic"
    before: float = 0.0
    bar: float = 0.0

    def fitted(self, height: int, width: int, side: int) -> tuple[int, int]:
        scale = min(side / height, side / width)
        return int(height * scale), int(width * scale)


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
