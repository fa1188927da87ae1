"""Eyes that say where the object of the instruction is, for pictures that no simulator stands behind.

A probe learns from pictures whose truth is known (``places.py``) and is then shown dreams: what it reads there, against
where the object truly is, says by how many millimetres a dream misplaces it (``likeness.object_error``).  It errs
itself, so its error on true pictures that it has not learnt from belongs beside every such number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.contract.errors import ContractError

_PART = 256  # pictures looked at together
_EXACT = 0.05  # of the spread of positions: from here on an error counts in proportion, no longer squared


@dataclass(frozen=True)
class ProbeConfig:
    """Sizes of the network, for pictures of about 64 x 64."""

    width: int = 32
    stem: int = 16  # channels of the first layer, which the task gates
    looks: int = 4  # places in a picture that the position is told from
    hidden: int = 128


class ObjectProbe(nn.Module):
    """Position of the object that a task names, from one picture of all cameras.

    A small convolutional network whose first layer, where colours are still told apart, is scaled and shifted by the
    task (FiLM, Perez et al. 2017, arXiv 1709.07871); the position is told from the features at a few attended places
    and from where these are (spatial softmax, Levine et al. 2016, arXiv 1504.00702).  ``training/probe.py`` trains it.
    """

    middle: Tensor
    spread: Tensor

    def __init__(self, picture: tuple[int, int, int], tasks: int, positions: np.ndarray, config: ProbeConfig) -> None:
        """``picture`` (h, w, c); ``tasks``: how many there are; ``positions`` [N,3] metres: those it will learn."""
        super().__init__()
        self.picture, self.tasks = tuple(picture), tasks
        width, stem, looks = config.width, config.stem, config.looks
        self.gate = nn.Embedding(tasks, 2 * stem)
        self.first = nn.Conv2d(picture[2], stem, 5, 2, 2)
        self.second = nn.Conv2d(stem, width, 3, 2, 1)
        self.third, self.fourth = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.attention = nn.Conv2d(width, looks, 1)
        self.tell = nn.Sequential(nn.Linear(looks * (width + 2), config.hidden), nn.SiLU(), nn.Linear(config.hidden, 3))
        self.register_buffer("middle", torch.as_tensor(positions.mean(0), dtype=torch.float32))
        # One for all axes, so that a millimetre weighs the same in each.
        self.register_buffer("spread", torch.tensor(max(float(positions.std(0).max()), 1e-3)))

    def forward(self, pictures: Tensor, tasks: Tensor) -> Tensor:
        """Positions [B,3] in metres, from ``pictures`` uint8 [B,h,w,c] and ``tasks`` int64 [B]."""
        scale, shift = self.gate(tasks)[..., None, None].chunk(2, 1)
        pixels = pictures.permute(0, 3, 1, 2).to(scale.dtype) / 127.5 - 1.0
        cells = functional.silu(self.first(pixels) * (1 + scale) + shift)
        cells = functional.silu(self.second(cells))
        cells = functional.silu(self.fourth(cells + functional.silu(self.third(cells))))
        weight = self.attention(cells).flatten(2).softmax(-1)
        y, x = (torch.linspace(-1, 1, side, device=cells.device, dtype=cells.dtype) for side in cells.shape[2:])
        where = weight @ torch.cartesian_prod(y, x).flip(-1)
        seen = torch.cat([weight @ cells.flatten(2).transpose(1, 2), 3.0 * where], -1).flatten(1)
        told: Tensor = self.middle + self.spread * self.tell(seen)
        return told

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Smooth L1 (Girshick 2015, arXiv 1504.08083) of the positions, in units of their spread.

        Squares would be spent on the few pictures in which the gripper hides the object.  ``batch``: ``pictures``,
        ``tasks`` and ``positions`` [B,3]; ``info["error_mm"]`` is the mean distance.
        """
        off = self(batch["pictures"], batch["tasks"]) - batch["positions"]
        loss = functional.smooth_l1_loss(off / self.spread, torch.zeros_like(off), beta=_EXACT)
        return loss, {"error_mm": 1e3 * float(off.detach().norm(dim=-1).mean())}

    @torch.no_grad()
    def locate(self, pictures: np.ndarray, tasks: np.ndarray) -> np.ndarray:
        """Positions float32 [N,3] in metres, of any number of ``pictures`` uint8 [N,h,w,c] with ``tasks`` [N].

        It answers for every picture, also where the object is not to be seen.  Raises ContractError for pictures or
        tasks other than those it was made for.
        """
        check(pictures, tasks, self.picture, self.tasks)
        shown, named = torch.from_numpy(np.ascontiguousarray(pictures)), torch.as_tensor(np.asarray(tasks, np.int64))
        device = self.middle.device
        parts = zip(shown.split(_PART), named.split(_PART), strict=True)
        told = [self(*(item.to(device) for item in part)).float().cpu() for part in parts]
        positions: np.ndarray = torch.cat([*told, torch.empty(0, 3)]).numpy()
        return positions


def check(pictures: np.ndarray, tasks: np.ndarray, picture: tuple[int, ...], count: int) -> None:
    """Raise ContractError unless ``pictures`` are uint8 [N,h,w,c] as ``picture`` and ``tasks`` [N] below ``count``."""
    fits = pictures.dtype == np.uint8 and pictures.shape[1:] == tuple(picture) and pictures.ndim == 4
    if not fits or np.shape(tasks) != pictures.shape[:1]:
        raise ContractError(
            f"pictures {pictures.dtype} {list(pictures.shape)} with tasks {list(np.shape(tasks))} are not what the "
            f"probe looks at, so it cannot say where anything is; give uint8 [N, {', '.join(map(str, picture))}] and "
            "[N]."
        )
    if len(tasks) and not 0 <= np.min(tasks) <= np.max(tasks) < count:
        raise ContractError(
            f"tasks {np.min(tasks)} to {np.max(tasks)} are not among the probe's {count}, so it would look for "
            "nothing it knows; train one that has seen them."
        )
