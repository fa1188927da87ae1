"""How alike imagined frames are to true ones, beside what a model reaches that only repeats the frame it was given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation.agreement import reached


@dataclass(frozen=True)
class FrameAgreement:
    """PSNR of the frames after ``horizon`` control steps, in dB, over the ``replays`` that lasted so long.

    ``copied`` is that of a model which repeats the last frame it was given: a still background alone makes it high.
    """

    horizon: int
    replays: int
    psnr: float
    copied: float


def frame_agreement(
    imagined: NDArray[np.uint8],
    true: NDArray[np.uint8],
    first: NDArray[np.uint8],
    length: ArrayLike,
    horizons: Sequence[int],
) -> tuple[FrameAgreement, ...]:
    """Likeness of imagined frames to true ones, and of the copied first frame to them, at each of ``horizons``.

    ``imagined`` and ``true`` uint8 [n,T,h,w,c] are the frames after each control step, ``first`` uint8 [n,h,w,c] the
    last frame that both began from, ``length`` [n] how many control steps have a frame in both.

    Raises ContractError for other shapes or dtypes and for a horizon that no replay reaches.
    """
    asked, steps = reached(horizons, length)
    frames = (imagined, true, first)
    alike = imagined.shape == true.shape and first.shape == true.shape[:1] + true.shape[2:]
    fits = true.ndim == 5 and steps.shape == true.shape[:1] and steps.max() <= true.shape[1]
    if not alike or not fits or any(item.dtype != np.uint8 for item in frames):
        given = ", ".join(f"{item.dtype} {list(item.shape)}" for item in frames)
        raise ContractError(
            f"imagined, true and first frames ({given}) of {steps.size} replays of up to {steps.max()} steps do not "
            "belong together, so they cannot be compared; give uint8 [n,T,h,w,c] twice and [n,h,w,c]."
        )
    results = []
    for horizon in asked:
        rows = np.flatnonzero(steps >= horizon)
        shown = true[rows, horizon - 1]
        both = psnr(imagined[rows, horizon - 1], shown), psnr(first[rows], shown)
        results.append(FrameAgreement(horizon, rows.size, *both))
    return tuple(results)


def psnr(shown: NDArray[np.uint8], true: NDArray[np.uint8]) -> float:
    """``10 log10(255^2 / MSE)`` in dB of uint8 frames of one shape, the error averaged over all frames first.

    (A mean over each frame's dB would be infinite with one equal frame, as copies of the first often are.)  Frames that
    are all equal count as if one value were one level off, the least they could differ by, so that dB stay finite.
    """
    squares = int(np.square(shown.astype(np.int32) - true.astype(np.int32)).sum(dtype=np.int64))
    return 10.0 * math.log10(255.0**2 * true.size / max(squares, 1))
