"""What an arm may do: limits of joints and workspace, how old a request may be, and how long silence is borne."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robot_drivers.driver import MISTAKEN, RATES, Joint, RobotSpec, check_joint, check_number, is_number
from vla_rl.contract.errors import ContractError, did_you_mean

MARGIN = 0.02  # of a joint's range, at each end
LEAD = 0.25  # s; position servos follow their target about .1 s late
LEAD_AT_MOST = 1.0  # s at the hardware's speed
SILENCE = 2.0  # s; an arm that goes on for longer on what was once asked for is out of control
CORNER = 20.0  # m, of a workspace's corner
ROUNDING = 1e-6  # of a limit, by which a file may differ from the hardware
_PER = {"velocity": "/s", "fastest": "/s", "acceleration": "/s²", "jerk": "/s³"}  # of a joint's unit
_ASKED = 10.0  # times the hardware's limit: then it is likely to be in another unit


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
        check_joint(self)
        for name in ("lead", "fastest"):
            check_number(f"{name} of joint {self.name!r}", getattr(self, name))
        if self.velocity > self.fastest * (1 + ROUNDING):
            raise ContractError(
                f"Joint {self.name!r} may move at {self.velocity:g}/s and is {self.fastest:g}/s at its "
                f"fastest, so it could not follow; give a velocity of at most {self.fastest:g}."
            )

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
            if len(corner) != 3 or not all(is_number(value) and abs(value) <= CORNER for value in corner):
                raise ContractError(
                    f"The workspace's {name} corner is {corner!r}, not three numbers in metres up to "
                    f"{CORNER:g}, so it would bound nothing (are these millimetres?); give [x, y, z]."
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
        check_number("control_hz of the limits", self.control_hz, *RATES)
        for name in ("max_age", "watchdog"):
            check_number(f"{name} of the limits", getattr(self, name), high=SILENCE)
        if not isinstance(self.deadman, bool):
            raise ContractError(
                f"deadman of the limits is {self.deadman!r}, so nobody knows whether motion needs a held switch; give "
                "true or false."
            )

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

    def check_hardware(self, spec: RobotSpec) -> None:
        """Raise ContractError unless these are limits of the joints of ``spec``, in its order, and within them."""
        named, has = [joint.name for joint in self.joints], [joint.name for joint in spec.joints]
        if named != has:
            raise ContractError(
                f"The limits are of the joints {named}, but {spec.name} has {has}, so it is not moved; give the "
                "limits of this arm in its order."
            )
        if abs(self.control_hz - spec.control_hz) > 1e-3 * spec.control_hz:
            raise ContractError(
                f"The limits have a control_hz of {self.control_hz:g} and {spec.name} is commanded at "
                f"{spec.control_hz:g} Hz, so it would move on for another time after a late step; give "
                f"{spec.control_hz:g}, or the driver its control_hz."
            )
        for joint, hardware in zip(self.joints, spec.joints, strict=True):
            _check_within(joint, hardware, spec.name)

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
        fields = fields_of("limits", cls, value)
        joints = (fields_of("a joint of the limits", JointLimits, joint) for joint in fields["joints"])
        fields["joints"] = tuple(JointLimits(**joint) for joint in joints)
        if fields.get("workspace") is not None:
            corners = fields_of("the workspace", Box, fields["workspace"])
            fields["workspace"] = Box(**{name: tuple(corner) for name, corner in corners.items()})
        return cls(**fields)


def fields_of(what: str, kind: Any, value: Any) -> dict[str, Any]:
    """``value`` if it is a mapping with fields of the dataclass ``kind``, with all that are needed; ``what`` it is of.

    Raises ContractError for anything else.
    """
    missing = dataclasses.MISSING
    known = {one.name: one.default is missing and one.default_factory is missing for one in dataclasses.fields(kind)}
    if not isinstance(value, Mapping):
        raise ContractError(f"{what} is {value!r}, so it cannot be read; give {{{', '.join(known)}}}.")
    for name in value.keys() - known.keys():
        raise ContractError(f"{what} has {name!r}, which means nothing, so it is not used; {did_you_mean(name, known)}")
    for name in [name for name, needed in known.items() if needed and name not in value]:
        raise ContractError(f"{what} lacks {name!r}, so it cannot be used; add it.")
    return dict(value)


def _check_within(joint: JointLimits, hardware: Joint, arm: str) -> None:
    """Raise ContractError where ``joint`` is allowed more than ``hardware`` can do."""
    rounding = ROUNDING * (hardware.high - hardware.low)
    lead = min(LEAD_AT_MOST * hardware.velocity, hardware.high - hardware.low)
    most = {name: getattr(hardware, name) for name in ("velocity", "acceleration", "jerk")}
    most |= {"lead": lead, "fastest": hardware.velocity}
    beyond = [("low", hardware.low)] if joint.low < hardware.low - rounding else []
    beyond += [("high", hardware.high)] if joint.high > hardware.high + rounding else []
    beyond += [(name, bound) for name, bound in most.items() if getattr(joint, name) > bound * (1 + ROUNDING)]
    for name, bound in beyond:
        value, unit = getattr(joint, name), hardware.unit
        asked = abs(value) > _ASKED * abs(bound) and unit in MISTAKEN
        question = f" (are these {MISTAKEN[unit]}?)" if asked else ""
        raise ContractError(
            f"{name} of joint {joint.name!r} is {value:g} in the limits, and the hardware of {arm} allows {bound:g} "
            f"({unit}{_PER.get(name, '')}), so the arm is not moved{question}; give {bound:g} or a stricter one."
        )
