"""Video models: they turn noise, context frames and actions into the next frames.

This is their interface, whether they work on pixels or on the latents of an autoencoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d, nn.Conv3d)


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


class VideoModel(nn.Module):
    """A denoiser of ``F`` frames at once, ``x_t = (1 - t) x + t eps``, that estimates ``x`` (x0-prediction).

    frames  ``F``: frames in a call
    latent  ``(c, y, x)`` of a frame's latents
    width   ``d``: entries of a feature
    """

    frames: int
    latent: tuple[int, int, int]
    width: int

    def encode(self, pictures: Tensor) -> Tensor:
        """Latents [...,c,y,x] of ``pictures`` [...,C,h,w] from -1 to 1, cameras side by side in ``C``."""
        raise NotImplementedError

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [...,C,h,w] of ``latents`` [...,c,y,x]."""
        raise NotImplementedError

    def forward(self, noisy: Tensor, level: Tensor, context: ContextLatents, action_input: ActionInput) -> Denoised:
        """Denoise ``noisy`` [B,F,c,y,x], whose noise levels are ``level`` [B,F]."""
        raise NotImplementedError

    def reconstruction(self, pictures: Tensor) -> Tensor | None:
        """Mean squared error of ``pictures`` [B,C,h,w] from -1 to 1 after encoding and decoding.

        For latents that are trained by this loss alone: no other gradient reaches ``encode`` and ``decode``, or they
        would become constant, which is easily predicted.  None where there is nothing to train.
        """
        return None


def zero_init(layer: Layer) -> Layer:
    """``layer`` with zero weights and biases."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
