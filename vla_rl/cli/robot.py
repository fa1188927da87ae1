"""``vla-rl robot [setup | calibrate | check] FILE ...``"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.limits import check_limits
from vla_rl.recipes import robots
from vla_rl.recipes.progress import console


@dataclass(frozen=True)
class Robot:
    """A robot arm on your desk, described by a file such as my_arm.json.

    setup FILE asks what the arm is connected to and writes the file.
    calibrate FILE walks you through the arm's own calibration.
    check FILE [--seconds S] looks at everything and moves nothing.
    """


@dataclass(frozen=True)
class Setup:
    """Ask which arm is plugged in where, and write the robot's file."""


@dataclass(frozen=True)
class Calibrate:
    """The arm's own calibration, by hand: it is limp meanwhile.  SO-101 arms keep it where LeRobot does."""


@dataclass(frozen=True)
class Check:
    """Ports, rates, limits and calibration of a robot, and whether it delivers what it declares; nothing moves."""

    seconds: float = 3.0  # how long the arm is measured

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        check_limits(self, seconds=(0.1, 600))


def robot(arguments: Sequence[str]) -> None:
    """Run one of the commands."""
    given = list(arguments)
    if not given or given[0].startswith("-"):
        override(Robot(), given or ["--help"], "vla-rl robot COMMAND FILE")
        return
    if given[0] not in COMMANDS:
        raise UserError(f"robot has no command {given[0]!r}; {did_you_mean(given[0], COMMANDS)}")
    if len(given) < 2 or given[1].startswith("-"):
        raise UserError(f"robot {given[0]} needs the robot's file, for example vla-rl robot {given[0]} my_arm.json.")
    COMMANDS[given[0]](Path(given[1]), given[2:])


def _setup(path: Path, options: list[str]) -> None:
    override(Setup(), options, "vla-rl robot setup FILE")
    robots.setup(path, console)
    console.print(f"{path} is written; next: vla-rl robot calibrate {path}, then vla-rl robot check {path}")


def _calibrate(path: Path, options: list[str]) -> None:
    override(Calibrate(), options, "vla-rl robot calibrate FILE")
    robots.calibrate(path, console)
    console.print(f"calibrated; next: vla-rl robot check {path}")


def _check(path: Path, options: list[str]) -> None:
    config: Check = override(Check(), options, "vla-rl robot check FILE")
    wrong = robots.check(path, config.seconds, console)
    if wrong:
        raise UserError(f"{wrong} of these must be mended before the arm is driven; nothing was moved.")


COMMANDS = {"setup": _setup, "calibrate": _calibrate, "check": _check}
