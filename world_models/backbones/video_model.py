"""What every backbone offers, whether it works on pixels or on the latents of an autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """What a prediction starts from.

    frames  [B,M,c,y,x]  latents of frames: the episode's first (clean, the reference), then the latest ones, in order
    level   [B,M]        how much noise is in them, 0 to 1
    """

    frames: Tensor
    level: Tensor


@dataclass(frozen=True)
class Moves:
    """What is done meanwhile, for each of the ``F`` frames to come.

    vector  [B,F,A]      the action before it, what is expected of the robot's state, and whether it is known at all
    map     [B,F,P,y,x]  where in the picture that is: bumps of height 1 at learned projections of the expected state
    """

    vector: Tensor
    map: Tensor


@dataclass(frozen=True)
class Guess:
    """An estimate of the frames without noise.

    clean     [B,F,c,y,x]
    features  [B,N,d]  what it was made from, place by place; heads read this
    """

    clean: Tensor
    features: Tensor


@runtime_checkable
class VideoModel(Protocol):
    """A denoiser of ``F`` frames at once, ``x_t = (1 - t) x + t eps``, that estimates ``x`` (x0-prediction)."""

    @property
    def frames(self) -> int:
        """``F``: frames in a call."""

    @property
    def latent(self) -> tuple[int, int, int]:
        """``(c, y, x)`` of a frame's latents."""

    @property
    def width(self) -> int:
        """``d``: entries of a feature."""

    def encode(self, pictures: Tensor) -> Tensor:
        """Latents [...,c,y,x] of ``pictures`` [...,C,h,w] from -1 to 1, cameras side by side in ``C``."""

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [...,C,h,w] of ``latents`` [...,c,y,x]."""

    def __call__(self, noisy: Tensor, level: Tensor, seen: Seen, moves: Moves) -> Guess:
        """Denoise ``noisy`` [B,F,c,y,x], whose noise levels are ``level`` [B,F]."""


@runtime_checkable
class Autoencoded(Protocol):
    """A video model whose latents are learnt, from this alone: no other gradient reaches ``encode`` and ``decode``.

    Latents that learnt to be easily predicted would end as a constant.
    """

    def reconstruction(self, pictures: Tensor) -> Tensor:
        """What is lost when ``pictures`` [B,C,h,w] from -1 to 1 are encoded and decoded."""
