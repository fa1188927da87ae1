"""The interface of backbones, whether they work on pixels or on the latents of an autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class ContextLatents:
    """What a prediction is conditioned on.

    frames  [B,M,c,y,x]  latents of frames: the episode's first (clean, the reference), with a prior of the robot the
                         latest one moved as the robot moves until each predicted one, then the latest ones, in order
    level   [B,M]        their noise levels, 0 to 1
    """

    frames: Tensor
    level: Tensor


@dataclass(frozen=True)
class ActionInput:
    """The actions, for each of the ``F`` frames to predict.

    vector  [B,F,A]      the actions before it, the predicted robot state, and whether they are known
    maps    [B,F,P,y,x]  learned maps of that state's position in the picture
    """

    vector: Tensor
    maps: Tensor


@dataclass(frozen=True)
class Denoised:
    """An estimate of the frames without noise.

    clean     [B,F,c,y,x]
    features  [B,N,d]  of every cell, read by the heads
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

    def __call__(self, noisy: Tensor, level: Tensor, context: ContextLatents, action_input: ActionInput) -> Denoised:
        """Denoise ``noisy`` [B,F,c,y,x], whose noise levels are ``level`` [B,F]."""


@runtime_checkable
class Autoencoded(Protocol):
    """A video model whose latents are trained by this loss alone: no other gradient reaches ``encode``, ``decode``.

    Latents trained to be easily predicted would become constant.
    """

    def reconstruction(self, pictures: Tensor) -> Tensor:
        """Mean squared error of ``pictures`` [B,C,h,w] from -1 to 1 after encoding and decoding."""
