"""Pictures as OpenVLA's image processor prepares them: resized, cropped if wanted, normalised once for either model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FINE_TUNED_CROP = 0.9  # the share of the area that checkpoints fine-tuned with random crops see (LIBERO)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # DINOv2's mean and std
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # SigLIP's


def openvla_pictures(images: Tensor, size: int, crop: float) -> tuple[Tensor, Tensor]:
    """uint8 [B,h,w,3] as float32 [B,3,size,size] for DINOv2 and for SigLIP.

    Resized regardless of the aspect ratio ("resize-naive") by PIL's bicubic filter, to within one level of 255.  Then
    the middle ``crop`` of the area is resized back, bilinearly as ``tf.image.crop_and_resize`` does; 1.0 crops nothing.
    Deviation: OpenVLA's own LIBERO evaluation first makes 224 pixels by JPEG and TensorFlow's lanczos3.
    """
    pictures = images.permute(0, 3, 1, 2).float()
    if pictures.shape[2:] != (size, size):
        resized = functional.interpolate(pictures, size=(size, size), mode="bicubic", antialias=True)
        pictures = resized.round().clamp(0.0, 255.0)
    if crop < 1.0:
        pictures = _middle(pictures / 255.0, crop)
    return _normalized(pictures / 255.0, *_IMAGENET), _normalized(pictures / 255.0, *_HALF)


def _middle(pictures: Tensor, area: float) -> Tensor:
    """The middle of pictures [B,3,h,w] in [0, 1], as large as they are, in levels 0 .. 255."""
    side = area**0.5
    along = [torch.linspace(-side, side, count, device=pictures.device) for count in pictures.shape[2:]]
    rows, columns = torch.meshgrid(*along, indexing="ij")
    grid = torch.stack([columns, rows], -1).expand(len(pictures), -1, -1, -1)
    middle = functional.grid_sample(pictures, grid, mode="bilinear", align_corners=True)
    return (middle.clamp(0.0, 1.0) * 255.5).floor()  # how TensorFlow makes bytes of numbers


def _normalized(pictures: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    offset, scale = (torch.tensor(item, device=pictures.device)[:, None, None] for item in (mean, std))
    return (pictures - offset) / scale
