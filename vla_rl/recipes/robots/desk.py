"""An arm on a desk: set up, calibrated, checked and teleoperated, by a person at a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from robot_drivers import setup as routine
from robot_drivers.cameras.camera import open_camera
from robot_drivers.check import PolicyTiming, check_robot
from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import Calibrates, connected
from robot_drivers.record import Query
from robot_drivers.simulated import SimulatedRobot
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.recipes.robots.drive import PolicyDecider, open_policy, robot_config
from vla_rl.recipes.robots.person import StatusLine, waiting
from vla_rl.recipes.robots.session import MAX_CHUNK, Execution, RealTimeSession


def setup(path: Path, show: Console) -> None:
    """Ask what a robot consists of and write its file."""
    routine.setup(path, asking(show))


def calibrate(path: Path, show: Console) -> None:
    """The arm's own calibration; raises UserError for an arm that has none."""
    config = RobotConfig.load(path)
    driver = config.open()
    if not isinstance(driver, Calibrates):
        raise UserError(f"{driver.spec.name} needs no calibration, so there is nothing to do; go on with robot check.")
    with connected(driver, config.driver.options):
        driver.calibrate(asking(show))


def home(path: Path) -> str:
    """Write into the robot's file that the arm's home is where it is now; returns what was written.

    Raises UserError where the arm is outside its limits.
    """
    config = RobotConfig.load(path)
    driver = config.open()
    with connected(driver, config.driver.options):
        position = driver.observe().position
    found = replace(config, home=tuple(round(float(one), 4) for one in position))
    found.home_of(driver)
    found.replace(path)
    return ", ".join(f"{joint.name} {one:g}" for joint, one in zip(driver.spec.joints, found.home or (), strict=True))


def check(name: str, seconds: float, policy: str, show: Console) -> int:
    """Print what was found about the robot of the file ``name``, as it is found; returns how many findings are wrong.

    "simulated" is the robot that everybody has.  With ``policy``, a checkpoint, run or server, its decisions are timed.
    """
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


_DECISIONS = 20


def measure_policy(config: RobotConfig, name: str, decisions: int = _DECISIONS) -> PolicyTiming:
    """Time ``decisions`` of the policy ``name`` on dark pictures of the declared sizes, its joints in the
    middle of their ranges; the arm is not needed.

    The first decision is not counted: models are compiled there.  Raises UserError for a policy that does not fit the
    arm, and for a server that does not answer.
    """
    import torch

    spec = declared_spec(config)
    low, high = (np.asarray(getattr(spec.state, end), np.float32) for end in ("low", "high"))
    middle = np.broadcast_to((low + high) / 2, spec.state.shape)[None].astype(np.float32)
    obs = replace(spec.zeros(1), state=middle)
    with closing(PolicyDecider(open_policy(name, spec), torch.Generator().manual_seed(1))) as decide:
        horizon = len(decide(Query(obs, 0, None, 1)).chunk)
        took = []
        for _ in range(decisions):
            began = time.perf_counter()
            decide(Query(obs, 0, None, 1))
            took.append(time.perf_counter() - began)
    return PolicyTiming(np.array(took), horizon)


def declared_spec(config: RobotConfig) -> EnvSpec:
    """What a policy for the robot of ``config`` is made for, by what its parts declare; nothing is connected."""
    driver = config.open()
    if load(config.driver.name) is SimulatedRobot:
        return config.driver.make().env_spec
    declared = {name: open_camera(part.name, part.options, name).spec for name, part in config.cameras.items()}
    sizes = {name: (camera.height, camera.width) for name, camera in declared.items()}
    steps = round(config.seconds * driver.spec.control_hz)
    return driver.spec.env_spec(sizes, config.tasks, steps, min(steps, MAX_CHUNK))


def teleoperate(config: RobotConfig, speed: float, show: Console) -> None:
    """Show how the arm does until Ctrl-C, at ``speed`` of its velocity limits.

    Raises UserError for a robot without a teleoperator, and for one in virtual time, which no person can keep up with.
    """
    if load(config.driver.name) is SimulatedRobot:
        raise UserError(
            "This robot is simulated in virtual time, so nobody can drive it; start one in real time with 'python -m "
            "robot_drivers.simulated robot.json' and name robot_drivers.simulated_process:SimulatedArm in a file."
        )
    if config.teleoperator is None:
        raise UserError(
            "The robot's file names no teleoperator, so nobody can drive the arm; add one, for example "
            '"teleoperator": {"name": "robot_drivers.teleop.keyboard:Keyboard"}.'
        )
    execution = Execution(Part("robot_drivers.executor:OpenLoop"), speed)
    with closing(RealTimeSession(replace(config, cameras={}), execution, waiting(show))) as session:
        show.print("The teleoperator drives the arm; Ctrl-C ends it.")
        try:
            with StatusLine(show) as status:
                for report in session.between_episodes():
                    status.update(report.record, report.stopped)
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped; the arm was brought to rest, and nothing was recorded.") from stop
