"""A probe that estimates the position of the named object from a picture, for pictures without a simulator.

It is trained on frames with known positions (``object_positions.py``) and applied to imagined frames: the distance of
its estimate to the true position is the position error of the world model (``frame_metrics.object_error``).  Report it
beside the probe's own error on true frames that it was not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.errors import ContractError

_BATCH = 256  # pictures per forward pass
_SMOOTH_L1_BETA = 0.05  # in standard deviations: errors above it count linearly instead of squared


@dataclass(frozen=True)
class ProbeConfig:
    """Sizes of the network, for pictures of about 64 x 64."""

    width: int = 32
    stem: int = 16  # channels of the first layer, which the task modulates
    keypoints: int = 4  # attended positions in the picture
    hidden: int = 128


class ObjectProbe(nn.Module):
    """Estimates the position of the object that a task names, from one picture of all cameras.

    A small convolutional network.  The task scales and shifts its first layer, where colours are still separate (FiLM,
    Perez et al. 2017, arXiv 1709.07871).  The position follows from the features at a few keypoints and from the
    keypoints' coordinates (spatial softmax, Levine et al. 2016, arXiv 1504.00702).  ``training/fit.py`` trains it.
    """

    position_mean: Tensor
    position_std: Tensor

    def __init__(self, picture: tuple[int, int, int], tasks: int, positions: np.ndarray, config: ProbeConfig) -> None:
        """``picture`` (h, w, c); ``tasks``: their number; ``positions`` [N,3] metres: the training targets."""
        super().__init__()
        self.picture, self.tasks = tuple(picture), tasks
        width, stem, keypoints = config.width, config.stem, config.keypoints
        self.gate = nn.Embedding(tasks, 2 * stem)
        self.first = nn.Conv2d(picture[2], stem, 5, 2, 2)
        self.second = nn.Conv2d(stem, width, 3, 2, 1)
        self.third, self.fourth = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.attention = nn.Conv2d(width, keypoints, 1)
        size, hidden = keypoints * (width + 2), config.hidden
        self.head = nn.Sequential(nn.Linear(size, hidden), nn.SiLU(), nn.Linear(hidden, 3))
        self.register_buffer("position_mean", torch.as_tensor(positions.mean(0), dtype=torch.float32))
        # One value for all axes, so that a millimetre has the same weight in each.
        self.register_buffer("position_std", torch.tensor(max(float(positions.std(0).max()), 1e-3)))

    def forward(self, pictures: Tensor, tasks: Tensor) -> Tensor:
        """Positions [B,3] in metres, from ``pictures`` uint8 [B,h,w,c] and ``tasks`` int64 [B]."""
        scale, shift = self.gate(tasks)[..., None, None].chunk(2, 1)
        pixels = pictures.permute(0, 3, 1, 2).to(scale.dtype) / 127.5 - 1.0
        features = functional.silu(self.first(pixels) * (1 + scale) + shift)
        features = functional.silu(self.second(features))
        features = functional.silu(self.fourth(features + functional.silu(self.third(features))))
        weight = self.attention(features).flatten(2).softmax(-1)
        sides = features.shape[2:]
        y, x = (torch.linspace(-1, 1, side, device=features.device, dtype=features.dtype) for side in sides)
        keypoints = weight @ torch.cartesian_prod(y, x).flip(-1)
        pooled = torch.cat([weight @ features.flatten(2).transpose(1, 2), 3.0 * keypoints], -1).flatten(1)
        positions: Tensor = self.position_mean + self.position_std * self.head(pooled)
        return positions

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Smooth L1 (Girshick 2015, arXiv 1504.08083) of the positions, in units of ``position_std``.

        A squared error would be dominated by the few pictures in which the gripper occludes the object.  ``batch``:
        ``pictures``, ``tasks`` and ``positions`` [B,3]; ``info["error_mm"]`` is the mean distance.
        """
        error = self(batch["pictures"], batch["tasks"]) - batch["positions"]
        loss = functional.smooth_l1_loss(error / self.position_std, torch.zeros_like(error), beta=_SMOOTH_L1_BETA)
        return loss, {"error_mm": 1e3 * float(error.detach().norm(dim=-1).mean())}

    @torch.no_grad()
    def locate(self, pictures: np.ndarray, tasks: np.ndarray) -> np.ndarray:
        """Positions float32 [N,3] in metres, of any number of ``pictures`` uint8 [N,h,w,c] with ``tasks`` [N].

        It also gives an estimate when the object is not visible.  Raises ContractError for pictures or tasks that do
        not fit the probe.
        """
        check(pictures, tasks, self.picture, self.tasks)
        images, named = torch.from_numpy(np.ascontiguousarray(pictures)), torch.as_tensor(np.asarray(tasks, np.int64))
        device = self.position_mean.device
        parts = zip(images.split(_BATCH), named.split(_BATCH), strict=True)
        found = [self(*(item.to(device) for item in part)).float().cpu() for part in parts]
        positions: np.ndarray = torch.cat([*found, torch.empty(0, 3)]).numpy()
        return positions


def check(pictures: np.ndarray, tasks: np.ndarray, picture: tuple[int, ...], count: int) -> None:
    """Raise ContractError unless ``pictures`` are uint8 [N,h,w,c] as ``picture`` and ``tasks`` [N] below ``count``."""
    fits = pictures.dtype == np.uint8 and pictures.shape[1:] == tuple(picture) and pictures.ndim == 4
    if not fits or np.shape(tasks) != pictures.shape[:1]:
        raise ContractError(
            f"pictures {pictures.dtype} {list(pictures.shape)} with tasks {list(np.shape(tasks))} do not fit the "
            f"probe, so it cannot locate anything; give uint8 [N, {', '.join(map(str, picture))}] and [N]."
        )
    if len(tasks) and not 0 <= np.min(tasks) <= np.max(tasks) < count:
        raise ContractError(
            f"tasks {np.min(tasks)} to {np.max(tasks)} are not among the probe's {count}, so it cannot "
            "locate their objects; train one on these tasks."
        )
