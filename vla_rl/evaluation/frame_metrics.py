"""How alike imagined frames are to true ones, and how far off they show the object that matters; beside what a model
reaches that only repeats the frame it was given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    asked, steps = _checked(imagined, true, first, length, horizons)
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


class Locates(Protocol):
    """Says where objects are, as :class:`vla_rl.evaluation.probe.ObjectProbe` does."""

    def locate(self, pictures: NDArray[np.uint8], tasks: NDArray[np.int64]) -> NDArray[np.float32]:
        """Positions [N,3] in metres, of ``pictures`` [N,h,w,c] with ``tasks`` [N]."""


@dataclass(frozen=True)
class Millimetres:
    """Median and 90th percentile (interpolated linearly) of distances."""

    median: float
    p90: float


@dataclass(frozen=True)
class ObjectAgreement:
    """How far from its true place the named object is seen after ``horizon`` control steps, over ``replays``.

    ``dream`` in imagined frames, ``copied`` in the first frame, as a model would show it that only repeats that.
    ``probe``: in the true frames, which is the error of the eyes themselves, so less cannot be told from nothing; None
    when the true place is not known and what the probe sees in the true frames stands for it.
    """

    horizon: int
    replays: int
    dream: Millimetres
    copied: Millimetres
    probe: Millimetres | None


def object_error(
    probe: Locates,
    imagined: NDArray[np.uint8],
    true: NDArray[np.uint8],
    first: NDArray[np.uint8],
    tasks: ArrayLike,
    length: ArrayLike,
    horizons: Sequence[int],
    positions: NDArray[np.floating] | None = None,
) -> tuple[ObjectAgreement, ...]:
    """Position error of the object that the tasks name, at each of ``horizons``; frames as in :func:`frame_agreement`.

    ``tasks`` int [n] of the replays; ``positions`` [n,T,3] in metres, where the object truly was after each control
    step (``places.replayed_positions``; beyond ``length`` anything).  A probe that has learnt from these very replays
    would be told to err too little.

    Raises ContractError as :func:`frame_agreement`, and for tasks or positions of other shapes or without a value.
    """
    asked, steps = _checked(imagined, true, first, length, horizons)
    named = np.asarray(tasks, np.int64)
    played = np.arange(true.shape[1]) < steps[:, None]
    known = positions is None or (positions.shape == (*true.shape[:2], 3) and np.isfinite(positions[played]).all())
    if named.shape != steps.shape or not known:
        given = None if positions is None else list(positions.shape)
        raise ContractError(
            f"tasks {list(named.shape)} and positions {given} do not say where the objects of "
            f"{steps.size} replays were, so no error can be told; give [n], and finite metres [n,T,3] or None."
        )
    begun = probe.locate(first, named)
    results = []
    for horizon in asked:
        lasting = np.flatnonzero(steps >= horizon)
        dreamt, seen = (probe.locate(item[lasting, horizon - 1], named[lasting]) for item in (imagined, true))
        place = seen if positions is None else positions[lasting, horizon - 1]
        own = None if positions is None else _apart(seen, place)
        results.append(
            ObjectAgreement(horizon, lasting.size, _apart(dreamt, place), _apart(begun[lasting], place), own)
        )
    return tuple(results)


def _apart(told: NDArray[np.floating], place: NDArray[np.floating]) -> Millimetres:
    distances = 1e3 * np.linalg.norm(told.astype(np.float64) - place, axis=-1)
    return Millimetres(float(np.median(distances)), float(np.percentile(distances, 90)))


def _checked(
    imagined: NDArray[np.uint8],
    true: NDArray[np.uint8],
    first: NDArray[np.uint8],
    length: ArrayLike,
    horizons: Sequence[int],
) -> tuple[list[int], NDArray[np.int64]]:
    """``horizons`` and ``length``, when all belong together; raises ContractError otherwise."""
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
    return asked, steps
