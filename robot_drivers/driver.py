"""What a robot arm is to this package: joints that are measured and take position targets, in SI units.

The names follow LeRobot's ``Robot`` (connect, observe, command, calibrate, disconnect; github.com/huggingface/lerobot,
``robots/robot.py``).  We deviate in units: LeRobot's drivers speak in percent of a range or in degrees, ours in radians
and metres, with a gripper as a fraction of its opening; a driver converts at its edge.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.load import load

MISTAKEN = {"rad": "degrees", "m": "millimetres", "1": "percent"}  # what a number that is too large may be meant in
FARTHEST = {"rad": 20.0, "m": 20.0, "1": 2.0}  # positions: three turns, a long rail, a gripper's opening
RATES = (1.0, 1000.0)  # Hz
T = TypeVar("T")
Asks = Callable[[str], str]
"""How a routine talks to the person at the robot: shows a sentence, waits for Enter, returns what was typed."""
LARGEST, SMALLEST = 1e6, 1e-6  # of any number that bounds a motion


@dataclass(frozen=True)
class Joint:
    """One joint and what its hardware allows.

    ``low`` and ``high`` bound the position in ``unit`` ("rad", "m", or "1" for a gripper: 0 closed, 1 open);
    ``velocity``, ``acceleration`` and ``jerk`` bound its first three derivatives, in ``unit``/s, /s² and /s³.
    """

    name: str
    low: float
    high: float
    velocity: float
    acceleration: float
    jerk: float
    unit: str = "rad"

    def __post_init__(self) -> None:
        check_joint(self)
        far, farthest = max(abs(self.low), abs(self.high)), FARTHEST.get(self.unit, LARGEST)
        if far > farthest:
            raise ContractError(
                f"Joint {self.name!r} goes to {far:g} {self.unit}, farther than any of {farthest:g}, so the arm is not "
                f"moved (are these {MISTAKEN.get(self.unit, 'other units')}?); let its driver convert to rad, m, and 0 "
                "to 1 for a gripper."
            )


@dataclass(frozen=True)
class RobotSpec:
    """A robot before anything is connected.

    ``joints`` are in the order of every array [D] of the robot.  ``control_hz`` is the rate at which it is commanded.
    """

    name: str
    joints: tuple[Joint, ...]
    control_hz: float

    def __post_init__(self) -> None:
        check_number(f"control_hz of {self.name}", self.control_hz, *RATES)
        names = [joint.name for joint in self.joints]
        if not names or len(set(names)) != len(names):
            raise ContractError(
                f"{self.name} has the joints {names}, so one is missing or two are taken for one; name each joint once."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """LeRobot's names of the positions: "shoulder_pan.pos"."""
        return tuple(f"{joint.name}.pos" for joint in self.joints)

    @property
    def position(self) -> ArraySpec:
        """The spec of a position [D], measured or commanded."""
        low, high = ([float(getattr(joint, end)) for joint in self.joints] for end in ("low", "high"))
        units = {joint.unit for joint in self.joints}
        unit = units.pop() if len(units) == 1 else ", ".join(joint.unit for joint in self.joints)
        return ArraySpec((len(self.joints),), "float32", tuple(low), tuple(high), unit, names=self.names)

    def target(self, position: Any) -> np.ndarray:
        """``position`` as a target float64 [D] of its own; raises ContractError for what is none."""
        found = numbers_of(position, len(self.joints))
        if found is None or not np.isfinite(found).all():
            raise ContractError(
                f"{position!r} is no target of the {len(self.joints)} joints of {self.name}, so nothing was sent; give "
                "a finite number for each."
            )
        return found

    def within(self, position: Any) -> np.ndarray:
        """The nearest :meth:`target` that the joints can reach."""
        return np.clip(self.target(position), self.position.low, self.position.high)

    def env_spec(
        self, cameras: Mapping[str, tuple[int, int]], tasks: Sequence[str], time_limit: int, max_chunk: int
    ) -> EnvSpec:
        """What its policy is made for; ``cameras`` {name: (height, width)}, ``time_limit`` in control steps."""
        return EnvSpec(
            name=self.name,
            images={name: ArraySpec((*size, 3), "uint8", 0, 255, frame=name) for name, size in cameras.items()},
            state=self.position,
            action=self.position,
            tasks=tuple(tasks),
            control_dt=1 / self.control_hz,
            time_limit=time_limit,
            max_chunk=max_chunk,
            profile="hardware",
        )


@dataclass(frozen=True)
class Measurement:
    """The robot at one moment.

    position  float64 [D]  in the joints' units
    velocity  float64 [D]  per second; None where the robot does not measure it
    captured  seconds of ``time.monotonic`` when it was measured, not when it arrived
    """

    position: np.ndarray
    velocity: np.ndarray | None
    captured: float
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


class DriverError(Exception):
    """The robot did not answer, or with nonsense; the text names what was asked of whom, and what came."""


@runtime_checkable
class RobotDriver(Protocol):
    """One arm.  Nothing moves before :meth:`command`, and no call blocks for longer than a control step or two.

    One that knows by itself how its episode stands, such as a simulated one, has an ``outcome`` (str) as well: the
    cause of the episode's end as in ``Step.cause``; "" while it runs.
    """

    @property
    def spec(self) -> RobotSpec:
        """Known before :meth:`connect`."""

    @property
    def is_connected(self) -> bool: ...

    def connect(self) -> None:
        """Open the bus and check what answers; raises UserError with the cure when the robot cannot be reached."""

    def observe(self) -> Measurement:
        """Measure; raises DriverError when the answer is missing or wrong."""

    def command(self, position: np.ndarray) -> np.ndarray:
        """Send a target float64 [D] and return what was sent, after clipping by the driver; raises DriverError."""

    def disconnect(self) -> None:
        """Leave the arm where it is, held or limp as its kind demands, and free the bus; safe to call twice."""


@runtime_checkable
class Calibrates(Protocol):
    """A driver whose raw readings need a calibration before they mean angles."""

    @property
    def is_calibrated(self) -> bool: ...

    def calibrate(self, ask: Asks) -> None:
        """Walk a person through it; ``ask`` shows a sentence and waits.  Saves in LeRobot's format."""


@runtime_checkable
class Resets(Protocol):
    """A robot whose scene can be prepared without a person: a simulated one."""

    def reset(self, seed: int) -> None:
        """Start the episode of ``seed``."""


def is_number(value: Any) -> bool:
    """Whether ``value`` is one finite number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def numbers_of(value: Any, joints: int) -> np.ndarray | None:
    """``value`` as float64 [joints] of its own, None where it is no such thing; its numbers may be infinite or NaN."""
    try:
        array = np.asarray(value)
        found = np.array(array, np.float64) if array.dtype.kind in "iuf" else None
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is not None and found.shape == (joints,) else None


def copied(measurement: Measurement, joints: int) -> Measurement:
    """``measurement`` with arrays of its own, of NaN where they are not numbers [joints]; an empty one if misshapen."""

    def array(value: Any) -> np.ndarray:
        found = numbers_of(value, joints)
        if found is None:
            found = np.full(joints if np.shape(value) in ((), (joints,)) else 0, np.nan)
        return found

    position, captured = array(measurement.position), measurement.captured
    velocity = None if measurement.velocity is None else array(measurement.velocity)
    return Measurement(position, velocity, float(captured) if is_number(captured) else np.nan, measurement.extras)


def check_number(what: str, value: Any, low: float = SMALLEST, high: float = LARGEST) -> None:
    """Raise ContractError unless ``value`` is a number from ``low`` to ``high``."""
    if not is_number(value) or not low <= value <= high:
        raise ContractError(
            f"{what} is {value!r}, so the arm could not be held to it; give a number from {low:g} to {high:g}."
        )


def check_joint(joint: Any) -> None:
    """Raise ContractError where the bounds of ``joint``, of hardware or of a file, are none."""
    for name in ("low", "high"):
        check_number(f"{name} of joint {joint.name!r}", getattr(joint, name), -LARGEST)
    if joint.high - joint.low < SMALLEST:
        raise ContractError(
            f"Joint {joint.name!r} may be from {joint.low:g} to {joint.high:g}, which is nowhere, so it could not "
            "move; give a low below the high."
        )
    for name in ("velocity", "acceleration", "jerk"):
        check_number(f"{name} of joint {joint.name!r}", getattr(joint, name))


def open_driver(name: str, options: Mapping[str, Any]) -> RobotDriver:
    """The driver that ``name`` ("module:Class") makes of ``options``, not yet connected; raises as :func:`opened`."""
    return opened(name, options, RobotDriver, "it cannot drive an arm")  # type: ignore[type-abstract]


def opened(name: str, options: Mapping[str, Any], kind: type[T], otherwise: str) -> T:
    """The ``kind`` that ``name`` ("module:Class") makes of ``options``.

    Raises UserError for a name that cannot be loaded or options that it does not take, and ContractError, which says
    what is so ``otherwise``, for something of another kind.
    """
    try:
        made = load(name)(**options)
    except TypeError as error:
        raise UserError(
            f"{name} cannot be made of {dict(options)} ({error}), so it is not used; correct its options."
        ) from error
    if not isinstance(made, kind):
        parts = [part for part in vars(kind) if not part.startswith("_") and not hasattr(made, part)]
        raise ContractError(
            f"{name} made a {type(made).__name__}, which has no {', no '.join(parts)}, so {otherwise}; see "
            f"{kind.__name__} in {kind.__module__.replace('.', '/')}.py."
        )
    return made


class DryRun:
    """Another arm (``RobotDriver``) without its :meth:`command`; it prepares no scene and judges no episode either.

    The arm does what it does when it is connected and disconnected: no driver of ours moves it then.  It stays where it
    is (or limp), so a policy sees an arm that does not follow, and the supervisor keeps the commands within their lead
    of where it is.
    """

    def __init__(self, driver: str, options: Mapping[str, Any] | None = None) -> None:
        """``driver`` is "module:Class" of the arm, ``options`` are its own; raises as ``open_driver`` does."""
        self._driver = arm = open_driver(driver, options or {})
        self.connect, self.observe, self.disconnect = arm.connect, arm.observe, arm.disconnect

    @property
    def spec(self) -> RobotSpec:
        return self._driver.spec

    @property
    def is_connected(self) -> bool:
        return self._driver.is_connected

    def command(self, position: np.ndarray) -> np.ndarray:
        """Send nothing, and return the target [D] that would have been sent."""
        return np.array(position, np.float64)


_OPTIONS_OF_PLACE = ("port", "host", "address")  # by which drivers are told where their arm is


@contextmanager
def claimed(options: Mapping[str, Any]) -> Iterator[None]:
    """The arm's port or address that a driver's ``options`` name, for one program on this computer at a time.

    The system gives it back however the program ends.  Raises UserError while another has it: commands of two would
    reach one arm, and neither's supervisor would know where it was sent.
    """
    if not (named := _place(options)):
        yield
        return
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    lock = Path(tempfile.gettempdir(), f"vla-rl-arm-{digest}")
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)  # also another user's
    except FileNotFoundError:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise UserError(
            f"another program on this computer drives the arm at {named!r}, so this one was not started; end that one "
            "first."
        ) from error
    try:
        yield
    finally:
        os.close(file)


def _place(options: Mapping[str, Any]) -> str:
    """Where an arm is, or the one inside another, as in a dry run; a file by its own name, whatever leads to it."""
    named = next((str(options[name]) for name in _OPTIONS_OF_PLACE if name in options), "")
    if not named and isinstance(inner := options.get("options"), Mapping):
        return _place(inner)
    return os.path.realpath(named) if os.path.exists(named) else named


@contextmanager
def connected(driver: RobotDriver, options: Mapping[str, Any]) -> Iterator[None]:
    """``driver``, made of ``options``, is connected and this program's alone; raises as :func:`claimed`."""
    with claimed(options):
        driver.connect()
        try:
            yield
        finally:
            driver.disconnect()
