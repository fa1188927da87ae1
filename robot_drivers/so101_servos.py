"""The six servos of an SO-101, follower or leader: who they are, how they are read, and their calibration."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from robot_drivers import feetech
from robot_drivers.calibration import (
    LAST_TICK,
    MotorCalibration,
    Scale,
    load_calibration,
    save_calibration,
)
from robot_drivers.driver import Asks, DriverError
from robot_drivers.feetech import Bus, Register, StatusError
from vla_rl.contract.errors import UserError

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
        self._matches = False
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
            self._matches = self.calibration is not None and self._read_calibration() == self.calibration
        except Exception:
            self.bus.close()
            raise

    @property
    def is_calibrated(self) -> bool:
        """Whether there is a calibration and the servos hold it too."""
        return self._matches

    @property
    def scale(self) -> Scale:
        """What ticks mean; raises UserError without a calibration."""
        if self.calibration is None or not self._matches:
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
        if self.calibration is not None and not self._anew(ask):
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

    def _anew(self, ask: Asks) -> bool:
        answer = ask(
            f"{str(self.path)!r} holds a calibration: press Enter to write it to the servos, or type c and press Enter "
            "to make a new one."
        )
        return answer.strip().lower() == "c"

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
        self.calibration, self._matches = dict(calibration), True

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
        with _Extremes(self) as seen:
            ask(
                f"Move every joint but {FULL_TURN} by hand through its whole range, one after the other, then press "
                "Enter."
            )
        lows, highs = seen.lows, seen.highs
        full = JOINTS.index(FULL_TURN)
        lows[full], highs[full] = 0, LAST_TICK
        still = [joint for joint, low, high in zip(JOINTS, lows, highs, strict=True) if low == high]
        if still:
            raise UserError(f"{', '.join(still)} did not move, so the arm is not calibrated; begin again.")
        return lows, highs


class _Extremes:
    """Watches the servos from a thread of its own while a person is waited for."""

    def __init__(self, servos: Servos) -> None:
        self._servos, self._enough = servos, threading.Event()
        self.lows = servos.read()[0]
        self.highs = self.lows.copy()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="calibration", daemon=True)

    def __enter__(self) -> _Extremes:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._enough.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _watch(self) -> None:
        try:
            while True:
                ticks = self._servos.read()[0]
                self.lows, self.highs = np.minimum(self.lows, ticks), np.maximum(self.highs, ticks)
                if self._enough.wait(0.01):
                    return
        except DriverError as error:
            self._error = error
