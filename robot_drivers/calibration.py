"""LeRobot's calibration of an arm: its JSON file, and what it makes of the encoders' ticks.

The file is LeRobot's, read and written as it is: {motor: {id, drive_mode, homing_offset, range_min, range_max}}, all in
ticks.  Joints are LeRobot's degrees in radians, (ticks - middle) · 2π/4095 with the middle of the calibrated range; the
gripper is LeRobot's 0 to 100 as a fraction.  As in LeRobot, ``drive_mode`` 1 inverts the gripper only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json

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
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


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
        found: np.ndarray = ticks * self._unit
        return found

    def ticks(self, position: np.ndarray) -> np.ndarray:
        """The nearest ticks, int64 [D] within the calibrated range; LeRobot cuts the fraction off."""
        found: np.ndarray = np.clip(np.rint(position / self._unit + self._zero), self._low, self._high).astype(np.int64)
        return found


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
