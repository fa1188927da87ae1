"""A person drives an arm by its teleoperator, through the supervisor; nothing is recorded."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from rich.console import Console

from robot_drivers.config import Part, RobotConfig
from robot_drivers.simulated import SimulatedRobot
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.recipes.robots.person import waiting
from vla_rl.recipes.robots.session import Execution, RealTimeSession
from vla_rl.recipes.robots.status import StatusLine


def teleoperate(config: RobotConfig, speed: float, show: Console) -> None:
    """Show how the arm does until Ctrl-C, at ``speed`` of its velocity limits.

    Raises UserError for a robot without a teleoperator, and for one in virtual time, which no person can keep up with.
    """
    if load(config.driver.name) is SimulatedRobot:
        raise UserError(
            "This robot is simulated in virtual time, so nobody can drive it; start one in real time with 'python -m "
            "robot_drivers.simulated robot.json' and name robot_drivers.simulated_client:SimulatedArm in a file."
        )
    if config.teleoperator is None:
        raise UserError(
            "The robot's file names no teleoperator, so nobody can drive the arm; add one, for example "
            '"teleoperator": {"name": "robot_drivers.teleop.keyboard:Keyboard"}.'
        )
    execution = Execution(Part("robot_drivers.chunks:OpenLoop"), speed)
    with closing(RealTimeSession(replace(config, cameras={}), execution, waiting(show))) as session:
        show.print("The teleoperator drives the arm; Ctrl-C ends it.")
        try:
            with StatusLine(show) as status:
                for report in session.between_episodes():
                    status.update(report.record, report.stopped)
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped; the arm was brought to rest, and nothing was recorded.") from stop
