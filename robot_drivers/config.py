"""A robot's file: which arm, cameras and teleoperator belong together, and what they may do.

    {
      "driver": {"name": "robot_drivers.so101:SO101", "options": {"port": "/dev/ttyACM0", "id": "my_arm"}},
      "cameras": {"front": {"name": "robot_drivers.cameras.opencv:OpenCVCamera", "options": {"index": 0}}},
      "teleoperator": {"name": "robot_drivers.teleop.leader:SO101Leader", "options": {"port": "/dev/ttyACM1"}},
      "tasks": ["pick up the cube"]
    }

``vla-rl robot setup`` asks for what it needs and writes one.  A file of somebody else is data: its parts are ours, at
devices of this computer, or it is refused (``vla_rl/contract/trust.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np

from robot_drivers.driver import RobotDriver, is_number, open_driver, opened
from robot_drivers.kinematics import Chain
from robot_drivers.limits import Limits, fields_of
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.contract.trust import mark, read_json, require_own, write_whole

_DAY = 86400.0  # s
# Parts that a file of others may name, by a word each: they start no program, and reach no farther than their options
# say.
ARMS = {
    "so101": "robot_drivers.so101:SO101",
    "ur": "robot_drivers.ur:UR",
    "franka": "robot_drivers.franka:Franka",
    "simulated": "robot_drivers.simulated:SimulatedRobot",
}
CAMERAS = {
    "opencv": "robot_drivers.cameras.opencv:OpenCVCamera",
    "realsense": "robot_drivers.cameras.realsense:RealSenseCamera",
}
TELEOPERATORS = {
    "keyboard": "robot_drivers.teleop.keyboard:Keyboard",
    "gamepad": "robot_drivers.teleop.gamepad:Gamepad",
    "spacemouse": "robot_drivers.teleop.gamepad:SpaceMouse",
    "leader": "robot_drivers.teleop.leader:SO101Leader",
}
CHAIN = "robot_drivers.kinematics:so101"
_OURS = frozenset({*ARMS.values(), *CAMERAS.values(), *TELEOPERATORS.values()})
_PLACES = ("host", "address", "index", "calibration")  # options that are an address or a file, unless a device
_DEVICE = re.compile(r"/dev/(pts/\d+|tty[\w.-]*|serial/by-(id|path)/[\w.:-]+|input/(js|event)\d+|video\d+)")
_WORDS = re.compile(r"[\w .-]*")
_LARGEST = 4096  # number in the options of a camera, or a simulated robot's environment: pixels, threads
_CAMERAS = 16


@dataclass(frozen=True)
class Part:
    """Something that is made of options: ``name`` is "module:Class", ``options`` are JSON."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """The object; raises UserError for a name that does not exist or an option that it does not take."""
        return opened(self.name, self.options, object, "")


@dataclass(frozen=True)
class RobotConfig:
    """A robot as its file describes it.

    ``limits``   of ``Limits.to_json``; None: what the hardware allows
    ``kinematics`` "module:function" that makes the arm's chain, which a workspace needs; "" for none
    ``tasks``    the instructions that it knows; episodes have one of them
    ``seconds``  of an episode, at most
    ``home``   where the arm goes before each episode: the joints' positions, in their order; None: it stays
    """

    driver: Part
    cameras: Mapping[str, Part] = field(default_factory=dict)
    teleoperator: Part | None = None
    limits: Mapping[str, Any] | None = None
    kinematics: str = ""
    tasks: tuple[str, ...] = ("",)
    seconds: float = 20.0
    home: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError('The robot has no task, so its episodes could not be named; give one, or [""].')
        if not 0.1 <= self.seconds <= _DAY:
            raise UserError(f"An episode of {self.seconds!r} s never begins or never ends; give 0.1 to {_DAY:g}.")
        for name in self.cameras:
            if not name.isidentifier():
                raise UserError(
                    f"A camera is called {name!r}, which cannot name a column of a dataset; use letters, digits and _."
                )

    def open(self) -> RobotDriver:
        """The arm, not yet connected."""
        return open_driver(self.driver.name, self.driver.options)

    def limits_of(self, driver: RobotDriver) -> Limits:
        """What the supervisor holds ``driver`` to.

        Raises ContractError for limits of other joints than the arm has, and for what its hardware cannot do.
        """
        if self.limits is None:
            return Limits.of(driver.spec)
        limits = Limits.from_json(self.limits)
        limits.check_hardware(driver.spec)
        return limits

    def home_of(self, driver: RobotDriver) -> np.ndarray | None:
        """Where ``driver`` waits between episodes, float64 [D]; raises UserError for where it cannot or may not be."""
        if self.home is None:
            return None
        joints = self.limits_of(driver).joints
        if len(self.home) != len(joints):
            raise UserError(
                f"the robot's home has {len(self.home)} positions, but {driver.spec.name} has {len(joints)} joints, so "
                "the arm is not moved; write it with 'vla-rl robot home FILE'."
            )
        for joint, position in zip(joints, self.home, strict=True):
            if not joint.low <= position <= joint.high:
                raise UserError(
                    f"the robot's home has {joint.name} at {position:g}, outside its limits {joint.low:g} to "
                    f"{joint.high:g}, so the arm is not moved; write it with 'vla-rl robot home FILE'."
                )
        return np.array(self.home, np.float64)

    def chain(self) -> Chain | None:
        """The arm's kinematics, where the file names them."""
        return load(self.kinematics)() if self.kinematics else None

    def save(self, path: Path) -> None:
        """Write the file; raises UserError where one is already, because it may hold an arm's limits."""
        if path.exists():
            raise UserError(f"{str(path)!r} exists already, so it is not overwritten; choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.replace(path)

    def replace(self, path: Path) -> None:
        """Write the file in the place of one that was loaded, which stays as it is where this fails.

        It is the user's own from then on.
        """
        for _, named in self._reaching():
            mark(named)
        write_whole(path, (json.dumps(self.to_json(), indent=2) + "\n").encode(), 0o644)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, from which :meth:`from_json` rebuilds the same."""
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, path: Path) -> RobotConfig:
        """Read a file; raises UserError when it cannot be read or says something unknown.

        And when it names code, addresses or files that are not ours, and this user's vla-rl did not write these names.
        """
        try:
            value = read_json(path.resolve())  # a link of the user's own
        except (OSError, ValueError) as error:
            raise UserError(
                f"The robot's file {str(path)!r} cannot be read ({error}), so no arm is known; write one with 'vla-rl "
                f"robot setup {path}'."
            ) from error
        config = cls.from_json(value)
        for reaching, named in config._reaching():
            require_own(named, f"the robot's file {str(path)!r} names {reaching}")
        return config

    def _reaching(self) -> Iterator[tuple[str, bytes]]:
        """What leads to code, addresses or files that are not ours: in words, and the part as the user wrote it."""
        parts = {"driver": self.driver, "teleoperator": self.teleoperator, **self.cameras}
        for what, part in parts.items():
            if part is None:
                continue
            own = [] if part.name in _OURS else [f"the class {part.name!r}"]
            places = (_reaching(name, value, what in self.cameras) for name, value in part.options.items())
            if reaching := next(itertools.chain(own, *places), ""):
                yield reaching, json.dumps(dataclasses.asdict(part), sort_keys=True).encode()
        if self.kinematics not in ("", CHAIN):
            yield f"the function {self.kinematics!r}", json.dumps(self.kinematics).encode()
        if len(self.cameras) > _CAMERAS:
            yield f"{len(self.cameras)} cameras", json.dumps(list(self.cameras)).encode()

    @classmethod
    def from_json(cls, value: Any) -> RobotConfig:
        """What :meth:`to_json` wrote, or a person; raises UserError for what is unknown or missing."""
        given = fields_of("the robot's file", cls, value)
        parts = {name: _part(name, given[name]) for name in ("driver", "teleoperator") if given.get(name) is not None}
        cameras, tasks, home = given.get("cameras") or {}, given.get("tasks", ("",)), given.get("home")
        if not isinstance(cameras, Mapping):
            raise UserError(f"The robot's cameras are {cameras!r}, so none is found; give {{name: camera}}.")
        if not _listed(tasks, str):
            raise UserError(
                f"the robot's tasks are {tasks!r}, so its episodes could not be named; give a list of instructions."
            )
        if not is_number(seconds := given.get("seconds", cls.seconds)):
            raise UserError(f"the robot's seconds are {seconds!r}, so no episode would end; give a number.")
        if home is not None and not _listed(home, int | float):
            raise UserError(
                f"the robot's home is {home!r}, so the arm would not know where to go; give a position for each joint, "
                "or write it with 'vla-rl robot home FILE'."
            )
        return cls(
            **parts,
            cameras={name: _part(f"camera {name!r}", camera) for name, camera in cameras.items()},
            limits=given.get("limits"),
            kinematics=str(given.get("kinematics", "")),
            tasks=tuple(tasks),
            seconds=float(seconds),
            home=None if home is None else tuple(map(float, home)),
        )


def _reaching(name: str, value: Any, nested: bool = False) -> Iterator[str]:
    """What the option ``name`` of a part leads to; where options are ``nested``, or a camera's, also large numbers."""
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else ((name, item) for item in value):
            yield from _reaching(str(key), item, nested or isinstance(value, Mapping))
    elif isinstance(value, str):
        if value and not _DEVICE.fullmatch(value) and (name in _PLACES or not _WORDS.fullmatch(value)):
            yield f"{value[:80]!r} as its {name}"
    elif nested and isinstance(value, int | float) and not abs(value) <= _LARGEST:
        yield f"{value} as its {name}"


def _listed(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value)


def _part(what: str, value: Any) -> Part:
    part = Part(**fields_of(what, Part, value))
    if not isinstance(part.name, str) or not isinstance(part.options, Mapping):
        raise UserError(
            f"{what} is {str(value)[:80]}, so it cannot be made; give a name, 'module:Class', and options, "
            "{name: value}."
        )
    return part
