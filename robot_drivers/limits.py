"""What an arm may do: limits of joints and workspace, how old a request may be, and how long silence is borne."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robot_drivers.driver import Joint, RobotSpec
from vla_rl.contract.errors import ContractError, did_you_mean

MARGIN = 0.02  # of a joint's range, at each end
LEAD = 0.25  # s; position servos follow their target about .1 s late


@dataclass(frozen=True)
class JointLimits:
    """Limits of one joint, in its unit, per s, per s² and per s³.

    ``lead`` is how far the command may be ahead of the measured position: more than the servo's lag at full speed
    plus what it sags under gravity, and no more than what may press on an obstacle.  ``fastest`` is the speed that
    the hardware can reach; a measurement that moved faster is wrong.
    """

    name: str
    low: float
    high: float
    velocity: float
    acceleration: float
    jerk: float
    lead: float
    fastest: float

    def __post_init__(self) -> None:
        _check_number(self.name, "low", self.low)
        _check_number(self.name, "high", self.high)
        if self.low >= self.high:
            raise ContractError(
                f"Joint {self.name!r} may be from {self.low:g} to {self.high:g}, which is nowhere, so it could not "
                "move; give a low below the high."
            )
        for name in ("velocity", "acceleration", "jerk", "lead", "fastest"):
            _check_positive(f"joint {self.name!r}", name, getattr(self, name))

    @classmethod
    def of(cls, joint: Joint, margin: float = MARGIN) -> JointLimits:
        """What the hardware allows, less ``margin`` of its range at each end."""
        room = margin * (joint.high - joint.low)
        low, high = joint.low + room, joint.high - room
        rates = (joint.velocity, joint.acceleration, joint.jerk)
        return cls(joint.name, low, high, *rates, lead=joint.velocity * LEAD, fastest=joint.velocity)


@dataclass(frozen=True)
class Box:
    """Where the points of the arm may be: between two corners [3], in metres in the frame of its base (z up)."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            corner = getattr(self, name)
            if len(corner) != 3 or not all(_is_number(value) for value in corner):
                raise ContractError(
                    f"The workspace's {name} corner is {corner!r}, not three numbers in metres, so the workspace is "
                    "unknown; give [x, y, z]."
                )
        if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
            raise ContractError(
                f"The workspace from {list(self.low)} to {list(self.high)} is empty, so the arm could be nowhere; give "
                "a low corner below the high one."
            )


@dataclass(frozen=True)
class Limits:
    """All that the supervisor holds an arm to.

    ``max_age``   s; an older request is stale
    ``watchdog``  s without an acceptable request, or with the deadman switch released, until the arm is brought to
    rest
    ``deadman``   motion needs a switch that a person holds
    ``workspace`` needs the arm's kinematics
    """

    joints: tuple[JointLimits, ...]
    control_hz: float
    max_age: float = 0.2
    watchdog: float = 0.3
    deadman: bool = False
    workspace: Box | None = None

    def __post_init__(self) -> None:
        names = [joint.name for joint in self.joints]
        if not names or len(set(names)) != len(names):
            raise ContractError(
                f"The limits are of the joints {names}, so a joint is missing or has two limits; name each joint once."
            )
        for name in ("control_hz", "max_age", "watchdog"):
            _check_positive("the limits", name, getattr(self, name))

    @classmethod
    def of(cls, spec: RobotSpec, margin: float = MARGIN, workspace: Box | None = None) -> Limits:
        """What the hardware of ``spec`` allows, less ``margin`` of each joint's range at each end."""
        if not 0 <= margin < 0.5:
            raise ContractError(
                f"A margin of {margin:g} of a joint's range at each end leaves nothing or is outside; give one from 0 "
                "to below .5."
            )
        return cls(tuple(JointLimits.of(joint, margin) for joint in spec.joints), spec.control_hz, workspace=workspace)

    def scaled(self, speed: float) -> Limits:
        """The same at ``speed`` in (0, 1] of the velocity.  Acceleration and jerk stay: a slow arm should stop soon."""
        if not 0 < speed <= 1:
            raise ContractError(f"A speed of {speed!r} times the limits is none in (0, 1]; give for instance 0.25.")
        joints = tuple(dataclasses.replace(joint, velocity=speed * joint.velocity) for joint in self.joints)
        return dataclasses.replace(self, joints=joints)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "joints": [dataclasses.asdict(joint) for joint in self.joints],
            "workspace": self.workspace and {"low": list(self.workspace.low), "high": list(self.workspace.high)},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Limits:
        """What :meth:`to_json` wrote, or a person; raises ContractError for names it does not know or misses."""
        fields = _fields(cls, value)
        joints = tuple(JointLimits(**_fields(JointLimits, joint)) for joint in fields.pop("joints"))
        box = fields.pop("workspace", None)
        corners = {} if box is None else {name: tuple(corner) for name, corner in _fields(Box, box).items()}
        return cls(joints=joints, workspace=Box(**corners) if corners else None, **fields)


def _fields(kind: Any, value: Any) -> dict[str, Any]:
    known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(kind)}
    given = dict(value) if isinstance(value, Mapping) else {}
    for name in given.keys() - known.keys():
        raise ContractError(f"{kind.__name__} has no {name!r}, so it would limit nothing; {did_you_mean(name, known)}")
    for name in [name for name, needed in known.items() if needed and name not in given]:
        raise ContractError(f"{kind.__name__} lacks {name!r}, so nothing would bound it; add it to the limits.")
    return given


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_number(joint: str, name: str, value: Any) -> None:
    if not _is_number(value):
        raise ContractError(
            f"{name} of joint {joint!r} is {value!r}, which bounds nothing, so the arm is not moved; give a number."
        )


def _check_positive(whose: str, name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ContractError(
            f"{name} of {whose} is {value!r}, so the arm could not be held to it; give a number above 0."
        )
