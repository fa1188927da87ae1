"""Similarity of imagined to true frames (PSNR), and position error of the named object in them.

The baseline beside each number is a model that repeats the initial frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation.agreement import check_horizons


@dataclass(frozen=True)
class FrameAgreement:
    """PSNR in dB of the frames after ``horizon`` control steps, over the ``replays`` of at least that length.

    ``copied`` is the PSNR of a model that repeats the initial frame: a static background alone makes it high.
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
    """PSNR of imagined frames, and of the copied initial frame, at each of ``horizons``.

    ``imagined`` and ``true`` uint8 [n,T,h,w,c] are the frames after each control step, ``first`` uint8 [n,h,w,c] the
    initial frame of both, ``length`` [n] the numbers of control steps that have a frame in both.

    Raises ContractError for other shapes or dtypes and for a horizon that no replay reaches.
    """
    checked, steps = _check_frames(imagined, true, first, length, horizons)
    results = []
    for horizon in checked:
        index = np.flatnonzero(steps >= horizon)
        frames = true[index, horizon - 1]
        both = psnr(imagined[index, horizon - 1], frames), psnr(first[index], frames)
        results.append(FrameAgreement(horizon, index.size, *both))
    return tuple(results)


def psnr(frames: NDArray[np.uint8], true: NDArray[np.uint8]) -> float:
    """``10 log10(255^2 / MSE)`` in dB of uint8 frames of one shape, with the MSE averaged over all frames.

    (A mean of dB over frames would be infinite with one identical frame, which copies of the first often are.)
    Identical arrays count as if one value differed by one level, the smallest possible error, so that dB stay finite.
    """
    squares = int(np.square(frames.astype(np.int32) - true.astype(np.int32)).sum(dtype=np.int64))
    return 10.0 * math.log10(255.0**2 * true.size / max(squares, 1))


class ObjectLocator(Protocol):
    """Estimates object positions from pictures, for example :class:`vla_rl.evaluation.probe.ObjectProbe`."""

    def locate(self, pictures: NDArray[np.uint8], tasks: NDArray[np.int64]) -> NDArray[np.float32]:
        """Positions [N,3] in metres, of ``pictures`` [N,h,w,c] with ``tasks`` [N]."""


@dataclass(frozen=True)
class Millimetres:
    """Median and 90th percentile (with linear interpolation) of distances in millimetres."""

    median: float
    p90: float


@dataclass(frozen=True)
class ObjectAgreement:
    """Position error of the named object after ``horizon`` control steps, over ``replays``.

    ``imagined``: located in imagined frames.  ``copied``: located in the initial frame (a model that repeats it).
    ``probe``: located in true frames, the probe's own error and so the smallest error that can be measured; None when
    true positions are unknown and the probe's estimate in the true frames replaces them.
    """

    horizon: int
    replays: int
    imagined: Millimetres
    copied: Millimetres
    probe: Millimetres | None


def object_error(
    probe: ObjectLocator,
    imagined: NDArray[np.uint8],
    true: NDArray[np.uint8],
    first: NDArray[np.uint8],
    tasks: ArrayLike,
    length: ArrayLike,
    horizons: Sequence[int],
    positions: NDArray[np.floating] | None = None,
) -> tuple[ObjectAgreement, ...]:
    """Position error of the named object at each of ``horizons``; frames as in :func:`frame_agreement`.

    ``tasks`` int [n] of the replays; ``positions`` [n,T,3] in metres, the object's true positions after each control
    step (``object_positions.replayed_positions``; ignored beyond ``length``).  The probe must not have been trained on
    these replays, or its error is underestimated.

    Raises ContractError as :func:`frame_agreement` does, and for tasks or positions of other shapes or not finite.
    """
    checked, steps = _check_frames(imagined, true, first, length, horizons)
    named = np.asarray(tasks, np.int64)
    played = np.arange(true.shape[1]) < steps[:, None]
    known = positions is None or (positions.shape == (*true.shape[:2], 3) and np.isfinite(positions[played]).all())
    if named.shape != steps.shape or not known:
        given = None if positions is None else list(positions.shape)
        raise ContractError(
            f"tasks {list(named.shape)} and positions {given} do not give the objects' positions in {steps.size} "
            "replays, so no error can be computed; give [n], and finite metres [n,T,3] or None."
        )
    located_first = probe.locate(first, named)
    results = []
    for horizon in checked:
        long_enough = np.flatnonzero(steps >= horizon)
        shown = (frames[long_enough, horizon - 1] for frames in (imagined, true))
        located_imagined, located_true = (probe.locate(frames, named[long_enough]) for frames in shown)
        place = located_true if positions is None else positions[long_enough, horizon - 1]
        own = None if positions is None else _distances(located_true, place)
        errors = _distances(located_imagined, place), _distances(located_first[long_enough], place)
        results.append(ObjectAgreement(horizon, long_enough.size, *errors, own))
    return tuple(results)


def _distances(located: NDArray[np.floating], place: NDArray[np.floating]) -> Millimetres:
    distances = 1e3 * np.linalg.norm(located.astype(np.float64) - place, axis=-1)
    return Millimetres(float(np.median(distances)), float(np.percentile(distances, 90)))


def _check_frames(
    imagined: NDArray[np.uint8],
    true: NDArray[np.uint8],
    first: NDArray[np.uint8],
    length: ArrayLike,
    horizons: Sequence[int],
) -> tuple[list[int], NDArray[np.int64]]:
    """``horizons`` and ``length``, checked against the frames; raises ContractError for a mismatch."""
    checked, steps = check_horizons(horizons, length)
    frames = (imagined, true, first)
    same_shape = imagined.shape == true.shape and first.shape == true.shape[:1] + true.shape[2:]
    fits = true.ndim == 5 and steps.shape == true.shape[:1] and steps.max() <= true.shape[1]
    if not same_shape or not fits or any(item.dtype != np.uint8 for item in frames):
        given = ", ".join(f"{item.dtype} {list(item.shape)}" for item in frames)
        raise ContractError(
            f"imagined, true and first frames ({given}) of {steps.size} replays of up to {steps.max()} steps do "
            "not match in shape or dtype, so they cannot be compared; give uint8 [n,T,h,w,c] twice and [n,h,w,c]."
        )
    return checked, steps
