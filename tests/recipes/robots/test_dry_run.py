"""A dry run: the arm is measured, the policy decides, every command is printed, and none is sent."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import DryRun
from robot_drivers.record import Decision, Query
from robot_drivers.runtime import ControlProcess
from tests.robot_drivers.arms import ARM, LIMITS
from vla_rl.cli import robot
from vla_rl.contract.errors import UserError
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.session import ControlStep, DrySession, dry, open_session

SPEED = drive.execution("open_loop", 8, 1.0)


def lift(query: Query) -> Decision:
    """Half of a radian higher at once, which the supervisor does not allow."""
    return Decision(np.repeat(np.asarray(query.obs.state, np.float64) + np.array([0.5, 0.0]), 8, axis=0))


def nobody(sentence: str, control: ControlProcess) -> None:
    """Presses Enter at once."""


def arm(path: Path) -> RobotConfig:
    """An arm in another process that writes every command that it is sent to ``path``."""
    part = Part("tests.robot_drivers.arms:FileArm", {"path": str(path)})
    return RobotConfig(part, limits=LIMITS.to_json(), tasks=("lift",), seconds=0.4)


def played(config: RobotConfig) -> tuple[list[ControlStep], str]:
    """The control steps of an episode, and what was printed of them."""
    printed = io.StringIO()
    with closing(open_session(config, SPEED, nobody)) as session:
        session.prepare("Episode 1")
        with session.display(Console(file=printed, width=60), 1) as display:
            seen = []
            for step in session.play(lift, 1, 0):
                seen.append(step)
                display.step("Episode 1", step.record, step.stopped)
            display.ended("Episode 1", [one.record for one in seen], 1, 0)
    return seen, printed.getvalue()


def test_an_arm_is_sent_nothing_and_every_command_is_a_line(tmp_path):
    seen, printed = played(dry(arm(tmp_path / "sent")))
    assert (tmp_path / "sent").read_text() == "end\n"
    decided = [one.record for one in seen if one.record.source == "policy"]
    assert decided and all(one.record.position.tolist() == [0.0, 0.5] for one in seen)
    assert 0 < decided[-1].executed[0] <= LIMITS.joints[0].lead + 1e-9  # it stays near an arm that does not follow
    lines = printed.splitlines()
    assert len(lines) == len(seen) + 1 and lines[-1].endswith(
        f"over after {len(seen)} commands, none of which was sent"
    )
    line = next(line for line, one in zip(lines, seen, strict=False) if one.record is decided[-1])
    assert "policy" in line and f"lift {decided[-1].executed[0]:+.3f} [+0.500]" in line and "gripper +0.500 " in line


def test_the_same_arm_is_sent_commands_otherwise(tmp_path):
    seen, _ = played(arm(tmp_path / "sent"))
    assert len((tmp_path / "sent").read_text().splitlines()) > len(seen) and seen[-1].record.position[0] > 0


def test_a_dry_arm_is_that_arm_but_prepares_and_judges_nothing():
    driver = DryRun("robot_drivers.simulated:SimulatedRobot", {"options": {"image_size": 16, "threads": 1}})
    assert driver.spec.name == "so101" and not driver.is_connected
    assert not hasattr(driver, "reset") and not hasattr(driver, "outcome")


def test_what_a_dry_run_cannot_do_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="time, which passes by commands, so nothing would happen"):
        robot.robot(["run", "simulated", "--policy", "expert", "--dry-run"])
    with pytest.raises(UserError, match="there is nothing to record; leave --out or --dry-run out"):
        robot.robot(["run", "simulated", "--policy", "expert", "--dry-run", "--out", str(tmp_path / "out")])


def test_a_dry_run_claims_no_success(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drive, "waiting", lambda show: nobody)
    arm(tmp_path / "sent").save(tmp_path / "arm.json")
    monkeypatch.setattr(drive, "build_decider", lambda *_: lift)
    robot.robot(["run", str(tmp_path / "arm.json"), "--policy", "mine", "--episodes", "1", "--dry-run"])
    printed = capsys.readouterr().err
    assert "of 20 commands were clipped; none was sent to the arm" in printed and "success" not in printed


def test_its_session_is_of_real_time(tmp_path):
    with closing(open_session(dry(arm(tmp_path / "sent")), SPEED, nobody)) as session:
        assert isinstance(session, DrySession) and session.spec.action.names == ARM.names
