"""The formulas by which public libraries normalize states and actions, as :class:`Affine`.

Every library has a formula and an epsilon of its own; a policy that normalizes by another one acts wrongly without any
error.  These are those of LeRobot's ``NormalizerProcessorStep``, openpi's ``Normalize``, transformers'
``PI0Processor`` and OpenVLA's ``predict_action``.  Two deviations: LeRobot divides by ``std + 1e-8`` but multiplies by
``std``; :class:`Affine` does both by ``std + 1e-8``, so an action differs by 1e-8 times the network's output.  Where an
entry never changed, its range is 2^-14 of its value if that is more than the epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_rl.contract.errors import UserError
from vla_rl.policies.normalization import Affine

Numbers = Mapping[str, Sequence[Any]]
"""Statistics of one vector by name, one entry per number: "mean", "std", "min", "max", "q01", "q99", "mask"."""

# Which two statistics are mapped to -1 and 1.
_RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
_PADDING = 1e-6  # scale of an entry that was always 0: at most openpi's epsilon


@dataclass(frozen=True)
class Statistics:
    """How a checkpoint normalizes state [S] and actions [D]; ``state`` is None where no state was recorded.

    ``source`` is the file, for messages.
    """

    state: Affine | None
    action: Affine
    source: str

    def cut(self, state_size: int, action_size: int) -> Statistics:
        """The same for vectors of these sizes; longer statistics are cut where the rest is padding (openpi pads to 32).

        Raises UserError where the sizes differ otherwise.
        """
        state = None if self.state is None else self._cut("state", self.state, state_size)
        return Statistics(state, self._cut("action", self.action, action_size), self.source)

    def _cut(self, part: str, affine: Affine, size: int) -> Affine:
        rest = zip(affine.offset[size:], affine.scale[size:], strict=True)
        if len(affine.offset) < size or any(abs(offset) > _PADDING or scale > _PADDING for offset, scale in rest):
            raise UserError(
                f"{self.source!r} holds statistics of {len(affine.offset)} {part} entries but the environment has "
                f"{size}, so they cannot be normalized; use the environment that the checkpoint was trained in, or "
                "name statistics of this robot's data with --vla.statistics FOLDER."
            )
        return Affine(affine.offset[:size], affine.scale[:size])


@dataclass(frozen=True)
class Modes:
    """Names of normalization modes, LeRobot's: MEAN_STD, MIN_MAX, QUANTILES, QUANTILE10, IDENTITY."""

    state: str = "MEAN_STD"
    action: str = "MEAN_STD"


@dataclass(frozen=True)
class Formula:
    """A library's arithmetic.

    ``added``: to every standard deviation; ``added_range``: to every range; ``empty_range``: in place of a range of 0.
    """

    added: float = 0.0
    added_range: float = 0.0
    empty_range: float = 0.0

    def affine(self, numbers: Numbers, mode: str, whose: str) -> Affine:
        """``numbers`` as an Affine; entries whose "mask" is false are not normalized.

        Raises UserError, naming ``whose``, for an unknown mode and for statistics that the mode needs and that are not
        there.
        """
        if mode == "IDENTITY":
            return identity(len(next(iter(numbers.values()))))
        if mode == "MEAN_STD":
            mean, std = _needed(numbers, ("mean", "std"), mode, whose)
            offset, scale = mean, [item + self.added for item in std]
        elif mode in _RANGES:
            low, high = _needed(numbers, _RANGES[mode], mode, whose)
            scale = [self._half_range(a, b) for a, b in zip(low, high, strict=True)]
            offset = [a + half for a, half in zip(low, scale, strict=True)]
        else:
            known = ", ".join(("MEAN_STD", *_RANGES, "IDENTITY"))
            raise UserError(
                f"{whose} is normalized by {mode!r}, which vla-rl does not know, so actions would be wrong; it knows "
                f"{known}."
            )
        if not all(map(math.isfinite, (*offset, *scale))):
            raise UserError(
                f"{whose} has statistics that are not finite, so they were never filled in; name others with "
                "--vla.statistics FOLDER."
            )
        mask = numbers.get("mask", [True] * len(offset))
        kept = list(zip(mask, offset, scale, strict=True))
        return Affine(tuple(o if m else 0.0 for m, o, _ in kept), tuple(s if m else 1.0 for m, _, s in kept))

    def _half_range(self, low: float, high: float) -> float:
        """What maps [low, high] to [-1, 1]."""
        half = (high - low + self.added_range or self.empty_range) / 2
        # Float32 does not resolve low + 5e-9, and what never changed must become -1 as in the other library.
        return half if high != low else max(half, abs(low) * 2.0**-15)


LEROBOT = Formula(added=1e-8, empty_range=1e-8)
LEROBOT_BUFFERS = Formula(added=1e-8, added_range=1e-8)  # before its processors
OPENPI = Formula(added=1e-6, added_range=1e-6)
OPENVLA = Formula(added_range=1e-8)
PI0_PROCESSOR = Formula(added=1e-8)


def identity(size: int) -> Affine:
    """No normalization of ``size`` entries."""
    return Affine((0.0,) * size, (1.0,) * size)


def _needed(numbers: Numbers, names: tuple[str, str], mode: str, whose: str) -> tuple[list[float], list[float]]:
    for name in names:
        if name not in numbers:
            raise UserError(
                f"{whose} has no statistic {name!r}, which the mode {mode} needs (it has {', '.join(numbers)}), so it "
                "cannot be normalized; add it, or name other statistics with --vla.statistics FOLDER."
            )
    first, second = ([float(item) for item in numbers[name]] for name in names)
    return first, second
