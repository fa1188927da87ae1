"""ManiSkill's controllers in physical units: metres, radians and their rates instead of numbers within -1 and 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.contract.spec import ArraySpec

_POSE = (("x", "y", "z", "rx", "ry", "rz"), ("m", "m", "m", "rad", "rad", "rad"))


@dataclass(frozen=True)
class Controls:
    """Actions of a robot, or of several one after the other, and how ManiSkill wants them.

    spec    bounds, units and names of an action [D]
    offset  float32 [D]  what ManiSkill's 0 means, in the unit of the entry
    scale   float32 [D]  what is added to that by its 1; negative where its sign is the other one
    robots  {name: which entries are its}; {} for a single robot, whose actions ManiSkill takes as they are

    ManiSkill shortens a rotation of ``pd_ee_delta_pose`` whose norm is more than the bound of an entry; the spec's
    bounds are a box around that ball.
    """

    spec: ArraySpec
    offset: np.ndarray
    scale: np.ndarray
    robots: dict[str, slice]

    def theirs(self, action: np.ndarray) -> np.ndarray:
        """``action`` float32 [...,D] in ManiSkill's numbers, which are within -1 and 1 where it normalises."""
        found: np.ndarray = (action - self.offset) / self.scale
        return found


def controls_of(controller: Any) -> Controls:
    """The controls of ``controller``: ManiSkill's ``agent.controller``, a dict of them where there are several robots.

    Bounds are those of the unnormalised controller, so the same action means the same motion in every control mode
    that has its units.
    """
    robots: dict[str, slice] = {}
    parts: list[_Part] = []
    for robot, own in controller.items() if isinstance(controller, dict) else [("", controller)]:
        first = sum(part.size for part in parts)
        parts += [_Part.of(one, f"{robot}_" if robot else "") for one in _leaves(own)]
        if robot:
            robots[robot] = slice(first, sum(part.size for part in parts))
    parts = [part for part in parts if part.size]
    low, high, offset, scale = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("low", "high", "offset", "scale")
    )
    spec = ArraySpec(
        (low.size,),
        "float32",
        tuple(low.tolist()),
        tuple(high.tolist()),
        unit=",".join(unit for part in parts for unit in part.units),
        frame=", ".join(dict.fromkeys(part.frame for part in parts if part.frame)),
        names=tuple(name for part in parts for name in part.names),
    )
    return Controls(spec, offset, scale, robots)


@dataclass(frozen=True)
class _Part:
    """The entries of one controller, for instance those of the gripper."""

    low: np.ndarray
    high: np.ndarray
    offset: np.ndarray
    scale: np.ndarray
    names: tuple[str, ...]
    units: tuple[str, ...]
    frame: str

    @property
    def size(self) -> int:
        return self.low.size

    @classmethod
    def of(cls, controller: Any, prefix: str) -> _Part:
        normalised = bool(getattr(controller.config, "normalize_action", False))
        space = controller._original_single_action_space if normalised else controller.single_action_space
        low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (space.low, space.high))
        offset: np.ndarray = np.zeros_like(low)
        scale: np.ndarray = np.ones_like(low)
        if normalised:
            offset, scale = (high + low) / 2, (high - low) / 2
            if "PDEEPoseController" in _kinds(controller):  # it multiplies rotations by their lower bound
                offset[3:], scale[3:] = 0.0, controller.config.rot_lower
                low[3:], high[3:] = -np.abs(scale[3:]), np.abs(scale[3:])
        names, units = _entries(controller, low.size)
        frame = getattr(controller.config, "frame", "")
        return cls(low, high, offset, scale, tuple(prefix + name for name in names), units, frame)


def _leaves(controller: Any) -> Iterator[Any]:
    """The controllers that ``controller`` is made of, in the order of its actions."""
    parts = getattr(controller, "controllers", None)
    yield from (leaf for part in parts.values() for leaf in _leaves(part)) if parts else [controller]


def _kinds(controller: Any) -> set[str]:
    return {kind.__name__ for kind in type(controller).__mro__}


def _entries(controller: Any, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and units of the entries of a controller; what is not known is in its own units."""
    kinds = _kinds(controller)
    if "PDEEPosController" in kinds:
        return _POSE[0][:size], _POSE[1][:size]
    joints = [controller.joints[i] for i in _controlled(controller)]
    names = tuple(joint.name for joint in joints)
    units = tuple("m" if "prismatic" in str(joint.type) else "rad" for joint in joints)
    rates = tuple(f"{unit}/s" for unit in units)
    if "PDBaseForwardVelController" in kinds:
        return ("forward", "turn"), ("m/s", "rad/s")
    if "PDJointPosVelController" in kinds and size == 2 * len(names):
        return (*names, *(f"{name}_rate" for name in names)), (*units, *rates)
    if size == len(names) and "PDJointVelController" in kinds:
        return names, rates
    if size == len(names) and "PDJointPosController" in kinds:
        return names, units
    return tuple(f"{type(controller).__name__}{i}" for i in range(size)), ("1 (of the controller)",) * size


def _controlled(controller: Any) -> list[int]:
    """Which of its joints a controller takes targets for; the others follow these."""
    chosen = getattr(controller, "control_joint_indices", None)
    return list(range(len(controller.joints))) if chosen is None else [int(i) for i in chosen]
