"""The SO-101 arm (and SO-100) of LeRobot: six STS3215 servos on a serial bus.

    open_driver("robot_drivers.so101:SO101", {"port": "/dev/ttyACM0", "id": "my_arm"})

The calibration file is LeRobot's: {motor: {id, drive_mode, homing_offset, range_min, range_max}}, all in ticks.  Joints
are LeRobot's degrees in radians, (ticks - middle) · 2π/4095 with the middle of the calibrated range; the gripper is
LeRobot's 0 to 100 as a fraction.  As in LeRobot, ``drive_mode`` 1 inverts the gripper only.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from robot_drivers import feetech
from robot_drivers.driver import Asks, DriverError, Joint, Measurement, RobotSpec
from robot_drivers.feetech import Bus, Register, StatusError
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json, write_whole

LAST_TICK = 4095
RADIANS = 2 * math.pi / LAST_TICK  # of one tick; LeRobot divides a turn by 4095, not 4096


@dataclass(frozen=True)
class MotorCalibration:
    """LeRobot's calibration of one motor, in ticks; ``range_min`` to ``range_max`` is how far the joint can go."""

    id: int
    drive_mode: int
    homing_offset: int
    range_min: int
    range_max: int


Calibration = Mapping[str, MotorCalibration]


def default_path(folders: Sequence[str], name: str) -> Path:
    """Where LeRobot keeps the calibration of the arm ``name``: the first of ``folders`` that has it, else the first.

    ``folders`` ("robots/so_follower") differ between LeRobot's versions.  HF_LEROBOT_CALIBRATION, HF_LEROBOT_HOME and
    HF_HOME move them as they do there.
    """
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    home = Path(os.environ.get("HF_LEROBOT_HOME", cache / "lerobot")).expanduser()
    root = Path(os.environ.get("HF_LEROBOT_CALIBRATION", home / "calibration")).expanduser()
    paths = [root / folder / f"{name}.json" for folder in folders]
    return next((path for path in paths if path.is_file()), paths[0])


def load_calibration(path: Path, motors: Sequence[str]) -> dict[str, MotorCalibration]:
    """The calibration of ``motors``, in their order; raises UserError naming what is wrong with the file."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the calibration {str(path)!r} cannot be read ({error}), so ticks mean no angles; calibrate the arm again."
        ) from error
    if not isinstance(found, dict) or set(found) != set(motors):
        raise _broken(path, f"it is not about {', '.join(motors)}")
    return {motor: _motor(path, motor, found[motor]) for motor in motors}


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write LeRobot's file, whole or not at all."""
    text = json.dumps({motor: asdict(entry) for motor, entry in calibration.items()}, indent=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), 0o644)


class Scale:
    """Ticks [D] to positions [D] (rad, the gripper 0 to 1) and back; ``gripper`` is its place in ``calibration``."""

    def __init__(self, calibration: Calibration, gripper: int) -> None:
        entries = list(calibration.values())
        self._low = np.array([entry.range_min for entry in entries])
        self._high = np.array([entry.range_max for entry in entries])
        self._zero = (self._low + self._high) / 2
        self._unit = np.full(len(entries), RADIANS)
        inverted = bool(entries[gripper].drive_mode)
        self._zero[gripper] = (self._high if inverted else self._low)[gripper]
        self._unit[gripper] = (-1.0 if inverted else 1.0) / (self._high - self._low)[gripper]
        self._gripper = gripper

    def position(self, ticks: np.ndarray) -> np.ndarray:
        """float64 [D] of ``ticks`` [D]; a gripper beyond its calibrated range is 0 or 1, as in LeRobot."""
        found: np.ndarray = (ticks - self._zero) * self._unit
        found[self._gripper] = np.clip(found[self._gripper], 0.0, 1.0)
        return found

    def velocity(self, ticks: np.ndarray) -> np.ndarray:
        """float64 [D] per second of ``ticks`` per second."""
        return ticks * self._unit

    def ticks(self, position: np.ndarray) -> np.ndarray:
        """The nearest ticks, int64 [D] within the calibrated range; LeRobot cuts the fraction off."""
        return np.clip(np.rint(position / self._unit + self._zero), self._low, self._high).astype(np.int64)


def _motor(path: Path, motor: str, found: object) -> MotorCalibration:
    names = [field.name for field in fields(MotorCalibration)]
    if not isinstance(found, dict) or set(found) != set(names) or any(type(n) is not int for n in found.values()):
        raise _broken(path, f"{motor!r} does not hold the whole numbers {', '.join(names)}")
    entry = MotorCalibration(**found)
    if not 0 <= entry.range_min < entry.range_max <= LAST_TICK:
        raise _broken(
            path, f"{motor!r} goes from {entry.range_min} to {entry.range_max}, not upwards in 0 to {LAST_TICK}"
        )
    return entry


def _broken(path: Path, why: str) -> UserError:
    return UserError(
        f"{str(path)!r} is no calibration of this arm ({why}), so it is not used; calibrate the arm again."
    )


JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
GRIPPER, FULL_TURN = JOINTS.index("gripper"), "wrist_roll"
IDS = (1, 2, 3, 4, 5, 6)
_HALF_TURN = LAST_TICK // 2
_FINE_SPEED = 0x04  # bit of Phase: speeds are in ticks/s, otherwise in 50 ticks/s
_COARSE = 50
# What LeRobot sets: an answer without delay, no limit to the acceleration, position control.
_ALL: Mapping[Register, int] = {
    feetech.RETURN_DELAY_TIME: 0,
    feetech.MAXIMUM_ACCELERATION: 254,
    feetech.ACCELERATION: 254,
    feetech.OPERATING_MODE: 0,
}


class Servos:
    """The servos behind one port, and the calibration at ``path`` (LeRobot's file), which may not be there yet."""

    def __init__(self, port: str, path: Path, timeout_ms: float) -> None:
        self.bus, self.path = Bus(port, timeout_ms / 1e3), path
        self.calibration = load_calibration(path, JOINTS) if path.is_file() else None
        self.is_calibrated = False  # whether there is a calibration and the servos hold it too
        self._speed = np.ones(len(IDS))

    def open(self) -> None:
        """Find all servos; raises UserError naming the one that is missing or of another kind."""
        self.bus.open()
        try:
            for joint, servo in zip(JOINTS, IDS, strict=True):
                model = self._find(joint, servo)
                if model != feetech.MODEL:
                    raise UserError(
                        f"servo {servo} ({joint}) on {self.bus.port!r} is of model {model}, not an STS3215 "
                        f"({feetech.MODEL}), so nothing is sent to it; check the port."
                    )
            phases = [self.bus.read(servo, feetech.PHASE) for servo in IDS]
            self._speed = np.array([1.0 if phase & _FINE_SPEED else _COARSE for phase in phases])
            self.is_calibrated = self.calibration is not None and self._read_calibration() == self.calibration
        except Exception:
            self.bus.close()
            raise

    @property
    def scale(self) -> Scale:
        """What ticks mean; raises UserError without a calibration."""
        if self.calibration is None or not self.is_calibrated:
            why = "the servos hold another calibration than" if self.calibration else "there is no calibration in"
            raise UserError(
                f"{why} {str(self.path)!r}, so the ticks of the arm at {self.bus.port!r} mean no angles; calibrate it, "
                "or name the file that belongs to it."
            )
        return Scale(self.calibration, GRIPPER)

    def configure(self, settings: Mapping[str, Mapping[Register, int]]) -> None:
        """Write LeRobot's settings and those of ``settings`` {joint: {register: value}} where the servos differ.

        A servo is limp while it is written to.  What is right already is not written again: its memory wears out.
        """
        for joint, servo in zip(JOINTS, IDS, strict=True):
            wanted = {**_ALL, **settings.get(joint, {})}
            differ = {register: value for register, value in wanted.items() if self.bus.read(servo, register) != value}
            if differ:
                self._release(servo)
                for register, value in differ.items():
                    self.bus.write(servo, register, value)

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ticks int64 [6], ticks/s float64 [6] and error status uint8 [6].

        Raises StatusError for a status other than a gripper's overload: LeRobot's settings let a gripper that holds
        something count as overloaded, and then weaken, by design.
        """
        answers = self.bus.sync_read(IDS, (feetech.PRESENT_POSITION, feetech.PRESENT_VELOCITY))
        for joint, servo, answer in zip(JOINTS, IDS, answers, strict=True):
            if answer.status & ~(feetech.OVERLOAD if joint == "gripper" else 0):
                raise StatusError(servo, answer.status)
        values = np.array([answer.values for answer in answers])
        return values[:, 0], values[:, 1] * self._speed, np.array([answer.status for answer in answers], np.uint8)

    def hold(self, ticks: np.ndarray) -> None:
        """Switch the torque on with the targets ``ticks`` [6]: the present position, so that nothing moves."""
        self.send(ticks)
        self.bus.sync_write(feetech.TORQUE_ENABLE, dict.fromkeys(IDS, 1))
        self.bus.sync_write(feetech.LOCK, dict.fromkeys(IDS, 1))

    def send(self, ticks: np.ndarray) -> None:
        """New targets [6]."""
        self.bus.sync_write(feetech.GOAL_POSITION, dict(zip(IDS, map(int, ticks), strict=True)))

    def release(self) -> None:
        """Switch every torque off, also when one servo fails; raises the first DriverError afterwards."""
        errors = []
        for servo in IDS:
            try:
                self._release(servo)
            except DriverError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def calibrate(self, ask: Asks) -> None:
        """LeRobot's routine: the middle of every range, then every range by hand; saved and written to the servos."""
        if self.calibration is not None:
            answer = ask(
                f"{str(self.path)!r} holds a calibration: press Enter to write it to the servos, or type c and press "
                "Enter to make a new one."
            )
            if answer.strip().lower() != "c":
                self._write_calibration(self.calibration)
                return
        self.release()
        for servo in IDS:
            self.bus.write(servo, feetech.OPERATING_MODE, 0)
        ask("Move the arm by hand until every joint is in the middle of its range, then press Enter.")
        offsets = self._home()
        lows, highs = self._ranges(ask)
        found = {
            joint: MotorCalibration(servo, 0, int(offset), int(low), int(high))
            for joint, servo, offset, low, high in zip(JOINTS, IDS, offsets, lows, highs, strict=True)
        }
        self._write_calibration(found)
        save_calibration(self.path, found)

    def _find(self, joint: str, servo: int) -> int:
        try:
            return self.bus.read(servo, feetech.MODEL_NUMBER)
        except StatusError:
            raise
        except DriverError as error:
            raise UserError(
                f"servo {servo} ({joint}) of the arm at {self.bus.port!r} is not there, so the arm is not used: {error}"
            ) from error

    def _release(self, servo: int) -> None:
        for register in (feetech.TORQUE_ENABLE, feetech.LOCK):
            with suppress(StatusError):  # a servo in trouble still does what it is told
                self.bus.write(servo, register, 0)

    def _read_calibration(self) -> dict[str, MotorCalibration]:
        read = self.bus.read
        return {
            joint: MotorCalibration(
                id=servo,
                drive_mode=self.calibration[joint].drive_mode if self.calibration else 0,  # servos do not hold it
                homing_offset=read(servo, feetech.HOMING_OFFSET),
                range_min=read(servo, feetech.MIN_POSITION_LIMIT),
                range_max=read(servo, feetech.MAX_POSITION_LIMIT),
            )
            for joint, servo in zip(JOINTS, IDS, strict=True)
        }

    def _write_calibration(self, calibration: Mapping[str, MotorCalibration]) -> None:
        self.release()
        for servo, entry in zip(IDS, calibration.values(), strict=True):
            self._write_range(servo, entry.homing_offset, entry.range_min, entry.range_max)
        self.calibration, self.is_calibrated = dict(calibration), True

    def _write_range(self, servo: int, offset: int, low: int, high: int) -> None:
        self.bus.write(servo, feetech.HOMING_OFFSET, offset)
        self.bus.write(servo, feetech.MIN_POSITION_LIMIT, low)
        self.bus.write(servo, feetech.MAX_POSITION_LIMIT, high)

    def _home(self) -> np.ndarray:
        """Make the present position the middle of the encoder; returns the offsets [6] that do so."""
        for servo in IDS:
            self._write_range(servo, 0, 0, LAST_TICK)
        largest = (1 << 11) - 1  # what Homing_Offset can hold
        offsets: np.ndarray = np.clip(self.read()[0] - _HALF_TURN, -largest, largest)
        for servo, offset in zip(IDS, offsets, strict=True):
            self.bus.write(servo, feetech.HOMING_OFFSET, int(offset))
        return offsets

    def _ranges(self, ask: Asks) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and largest ticks [6] that were seen while a person moved the arm."""
        enough = threading.Event()

        def watch() -> tuple[np.ndarray, np.ndarray]:
            lows = highs = self.read()[0]
            while not enough.wait(0.01):
                ticks = self.read()[0]
                lows, highs = np.minimum(lows, ticks), np.maximum(highs, ticks)
            return lows.copy(), highs.copy()

        with ThreadPoolExecutor(1, "calibration") as thread:
            watching = thread.submit(watch)
            try:
                ask(
                    f"Move every joint but {FULL_TURN} by hand through its whole range, one after the other, then "
                    "press Enter."
                )
            finally:
                enough.set()
            lows, highs = watching.result()
        full = JOINTS.index(FULL_TURN)
        lows[full], highs[full] = 0, LAST_TICK
        still = [joint for joint, low, high in zip(JOINTS, lows, highs, strict=True) if low == high]
        if still:
            raise UserError(f"{', '.join(still)} did not move, so the arm is not calibrated; begin again.")
        return lows, highs


_FOLDERS = ("robots/so101_follower", "robots/so_follower")  # LeRobot's until 0.4.3, and since
# rad: the published joint limits of the arm (TheRobotStudio/SO-ARM100, Simulation/SO101/so101_new_calib.urdf).
_PUBLISHED = {
    "shoulder_pan": 1.91986,
    "shoulder_lift": 1.74533,
    "elbow_flex": 1.69,
    "wrist_flex": 1.65806,
    "wrist_roll": 2.74385,  # to the other side 2.84121
}
_SPEED = 4.71  # rad/s: 0.222 s for 60° without load at 7.4 V (Feetech's data sheet of the STS3215)
_ACCELERATION = 254 * 100 * RADIANS  # rad/s²: the largest that its memory can hold
_JERK = 10 * _ACCELERATION  # rad/s³: our choice; nothing is published
_OPENING = 1.91986  # rad between the gripper's published limits, for an arm without calibration
_GAINS: Mapping[Register, int] = {feetech.P_COEFFICIENT: 16, feetech.I_COEFFICIENT: 0, feetech.D_COEFFICIENT: 32}
# Half of its torque and current, so that a gripper that holds something does not burn out.
_GRIPPER: Mapping[Register, int] = {
    feetech.MAX_TORQUE_LIMIT: 500,
    feetech.PROTECTION_CURRENT: 250,
    feetech.OVERLOAD_TORQUE: 25,
}
_SETTINGS = {**dict.fromkeys(JOINTS, _GAINS), "gripper": {**_GAINS, **_GRIPPER}}


class SO101:
    """The follower.  Its torque comes on with the first :meth:`command`, at the position where the arm is.

    port                          the serial port ("/dev/ttyACM0")
    id                            LeRobot's name of this arm, which chooses the calibration file
    calibration                   another path of that file
    control_hz                    rate at which it is commanded
    timeout_ms                    time that the servos have for an answer; a request is repeated twice
    disable_torque_on_disconnect  whether the arm goes limp at the end, as LeRobot's does; otherwise it is held

    Raises UserError for a calibration file that is none.  Without one the arm can be connected and calibrated only.
    """

    def __init__(
        self,
        port: str,
        id: str = "so101",
        calibration: str = "",
        control_hz: float = 30.0,
        timeout_ms: float = 10.0,
        disable_torque_on_disconnect: bool = True,
    ) -> None:
        path = Path(calibration).expanduser() if calibration else default_path(_FOLDERS, id)
        self._servos = Servos(port, path, timeout_ms)
        self._control_hz, self._limp_at_the_end = control_hz, disable_torque_on_disconnect
        self._held = False

    @property
    def spec(self) -> RobotSpec:
        """Joints go as far as they were calibrated, or as published where they were not."""
        return RobotSpec("so101", joints(self._servos.calibration), self._control_hz)

    @property
    def is_connected(self) -> bool:
        return self._servos.bus.is_open

    @property
    def is_calibrated(self) -> bool:
        """Whether the servos hold the calibration of the file; known after :meth:`connect`."""
        return self._servos.is_calibrated

    def connect(self) -> None:
        """Find the servos and write LeRobot's settings; nothing moves, and an arm that is limp stays so."""
        self._servos.open()
        try:
            self._servos.configure(_SETTINGS)
        except Exception:
            self._servos.bus.close()
            raise

    def observe(self) -> Measurement:
        """The joints now; ``extras["status"]`` uint8 [6] is not 0 for a gripper that is overloaded."""
        scale = self._servos.scale
        asked = time.monotonic()
        ticks, speed, status = self._servos.read()
        captured = (asked + time.monotonic()) / 2
        return Measurement(scale.position(ticks), scale.velocity(speed), captured, {"status": status})

    def command(self, position: np.ndarray) -> np.ndarray:
        """Send a target float64 [6], rounded to ticks within the calibrated range; the first switches torque on."""
        target, scale = self.spec.target(position), self._servos.scale
        ticks = scale.ticks(target)
        if not self._held:
            self._servos.hold(self._servos.read()[0])
            self._held = True
        self._servos.send(ticks)
        return scale.position(ticks)

    def calibrate(self, ask: Asks) -> None:
        """LeRobot's routine, by hand; the arm is limp afterwards."""
        self._held = False
        self._servos.calibrate(ask)

    def disconnect(self) -> None:
        """Release torque (``disable_torque_on_disconnect``) and port; raises DriverError if a servo is silent."""
        if not self.is_connected:
            return
        try:
            if self._limp_at_the_end:
                self._servos.release()
        finally:
            self._held = False
            self._servos.bus.close()


def joints(calibration: Calibration | None) -> tuple[Joint, ...]:
    """The joints of an arm with this calibration, from shoulder to gripper."""
    found = []
    for name in JOINTS[:-1]:
        reach = _PUBLISHED[name]
        if calibration and name != FULL_TURN:  # whose range is not measured
            reach = (calibration[name].range_max - calibration[name].range_min) / 2 * RADIANS
        found.append(Joint(name, -reach, reach, _SPEED, _ACCELERATION, _JERK))
    opening = _OPENING
    if calibration:
        opening = (calibration["gripper"].range_max - calibration["gripper"].range_min) * RADIANS
    gripper = Joint("gripper", 0.0, 1.0, _SPEED / opening, _ACCELERATION / opening, _JERK / opening, unit="1")
    return (*found, gripper)
