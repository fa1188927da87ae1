"""Robots that the tests of this folder play on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from robot_drivers.config import Part, RobotConfig
from robot_drivers.limits import Limits
from robot_drivers.record import ControlStep
from robot_drivers.simulated import SimulatedRobot
from tests.robot_drivers.arms import HERE, LIMITS
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.session import LockstepSession

OPTIONS = {"image_size": 16, "threads": 1}
BLIND = {"render": False, "threads": 1}
OPEN_LOOP = drive.execution("open_loop", 8, 1.0)
HORIZON = drive.execution("receding_horizon", 8, 1.0)


def simulated(seconds: float = 20.0, **options: Any) -> RobotConfig:
    """The SO-101 in virtual time, whose episodes last for ``seconds`` at most."""
    arm = {"options": {**OPTIONS, **options}}
    limits = Limits.of(SimulatedRobot(**arm).spec, margin=0.0).to_json()
    return RobotConfig(Part("robot_drivers.simulated:SimulatedRobot", arm), limits=limits, seconds=seconds)


def file_arm(path: Path, kind: str = "FileArm", **fields: Any) -> RobotConfig:
    """The toy arm in another process, at [0, .5], which writes every command to the file ``path``."""
    return RobotConfig(Part(f"{HERE}:{kind}", {"path": str(path)}), limits=LIMITS.to_json(), **fields)


def in_real_time(address: str, **fields: Any) -> RobotConfig:
    """The simulated arm that is a process at ``address``."""
    parts = {"address": address, "options": {**OPTIONS, "seconds": 600}}
    arm = Part("robot_drivers.simulated_process:SimulatedArm", parts)
    return RobotConfig(arm, limits=Limits.of(arm.make().spec, margin=0.0).to_json(), **fields)


def expert_plays(
    config: RobotConfig, seed: int = 7, execution: Any = OPEN_LOOP
) -> tuple[LockstepSession, Sequence[ControlStep]]:
    """An episode of the scripted expert, and the session (closed) that it was played in."""
    with closing(LockstepSession(config, execution)) as session:
        decide = drive.build_decider(session, config, drive.EpisodesConfig("expert", 1, 1, execution))
        return session, list(session.play(decide, 1, seed))
