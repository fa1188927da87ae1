"""Which control steps of a call are known, and which of them have a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CallSteps:
    """A call of ``frames`` F control steps with ``pictures`` P at equal distances.

    Of its actions the first ``known`` [B] count, 1 to F.
    """

    frames: int
    pictures: int

    @property
    def stride(self) -> int:
        """Control steps from one picture to the next."""
        return self.frames // self.pictures

    def slot(self, known: Any) -> Any:
        """Index [B] of the picture at the last known action; tensors or arrays."""
        return (known - 1) // self.stride

    def flag(self, known: Tensor) -> Tensor:
        """[B,F]: 1.0 for the known control steps."""
        return (torch.arange(self.frames, device=known.device) < known[:, None]).float()

    def pictured(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """Each picture's control step from 0 [B,P], at most the last known one; and whether the picture counts."""
        first = torch.arange(0, self.frames, self.stride, device=known.device)
        return torch.minimum(first + self.stride, known[:, None]) - 1, first < known[:, None]

    def at_pictures(self, state: Tensor, known: Tensor) -> Tensor:
        """[B,P,S]: which of the states [B,F,S] the robot is in at each picture."""
        index = torch.arange(len(known), device=known.device)[:, None]
        return state[index, self.pictured(known)[0]]
