"""An arm on a desk: set up, calibrated and checked, by a person at a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from robot_drivers import setup as routine
from robot_drivers.check import check_robot
from robot_drivers.config import RobotConfig
from robot_drivers.devices import claimed
from robot_drivers.driver import Calibrates
from vla_rl.contract.errors import UserError


def setup(path: Path, show: Console) -> None:
    """Ask what a robot consists of and write its file."""
    routine.setup(path, asking(show))


def calibrate(path: Path, show: Console) -> None:
    """The arm's own calibration; raises UserError for an arm that has none."""
    config = RobotConfig.load(path)
    driver = config.open()
    if not isinstance(driver, Calibrates):
        raise UserError(f"{driver.spec.name} needs no calibration, so there is nothing to do; go on with robot check.")
    with claimed(config.driver.options):
        driver.connect()
        try:
            driver.calibrate(asking(show))
        finally:
            driver.disconnect()


def home(path: Path) -> str:
    """Write into the robot's file that the arm's home is where it is now; returns what was written.

    Raises UserError where the arm is outside its limits.
    """
    config = RobotConfig.load(path)
    driver = config.open()
    with claimed(config.driver.options):
        driver.connect()
        try:
            position = driver.observe().position
        finally:
            driver.disconnect()
    found = replace(config, home=tuple(round(float(one), 4) for one in position))
    found.home_of(driver)
    found.replace(path)
    return ", ".join(f"{joint.name} {one:g}" for joint, one in zip(driver.spec.joints, found.home or (), strict=True))


def check(name: str, seconds: float, policy: str, show: Console) -> int:
    """Print what was found about the robot of the file ``name``, as it is found; returns how many findings are wrong.

    "simulated" is the robot that everybody has.  With ``policy``, a checkpoint, run or server, its decisions are timed.
    """
    from vla_rl.recipes.robots.drive import robot_config
    from vla_rl.recipes.robots.latency import measure_policy

    config, wrong = robot_config(name), 0
    timing = partial(measure_policy, config, policy) if policy else None
    for finding in check_robot(config, seconds, policy=timing):
        wrong += not finding.good
        mark = ("ok   ", "green") if finding.good else ("WRONG", "red")
        show.print(Text.assemble(mark, f"  {finding}"))
    return wrong


def asking(show: Console) -> Callable[[str], str]:
    """Shows a sentence, waits for Enter, and returns what was typed."""

    def ask(sentence: str) -> str:
        try:
            return show.input(Text(f"{sentence} "))
        except EOFError as end:
            show.print()
            raise UserError("Nobody answers any more, so this was given up; run it on a terminal.") from end

    return ask
