"""The simulated robot as a process: it holds and goes on whoever dies, and it says what it saw."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from robot_drivers import simulated_process
from robot_drivers.cameras.camera import CameraError, FrameSource
from robot_drivers.driver import DriverError, Resets, RobotDriver
from robot_drivers.simulated_process import SimulatedArm, SimulatedCamera
from tests.patience import PATIENCE, wait_until
from tests.robot_drivers.simulated_robot import SimulatedProcess
from vla_rl.contract.errors import ContractError, UserError

OPTIONS = {"image_size": 16, "threads": 1, "seconds": 3600}
AWAY = np.array([0.2, 0.0, 0.0, 1.4, 1.5, 0.5])


@pytest.fixture(scope="module")
def robot(tmp_path_factory):
    """A running process and its record."""
    record = tmp_path_factory.mktemp("robot") / "record.jsonl"
    with SimulatedProcess(robot={"options": OPTIONS}, record=str(record)) as process:
        process.record = record
        yield process


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Answers come, however long the other process is held up."""
    monkeypatch.setattr(simulated_process, "_PATIENCE", PATIENCE)


@pytest.fixture
def arm(robot):
    """Its connected driver, at the start of an episode."""
    made = SimulatedArm(robot.address, options=OPTIONS)
    made.connect()
    made.reset(3)
    yield made
    made.disconnect()


def arrived(arm):
    return np.abs(arm.observe().position - AWAY).max() < 0.02


def seen_by(robot):
    """The lines of the record that are complete."""
    return [json.loads(line) for line in robot.record.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_it_is_a_driver_whose_measurements_are_fresh(arm):
    assert isinstance(arm, RobotDriver) and isinstance(arm, Resets)
    first = arm.observe().captured
    assert first <= time.monotonic()
    wait_until(lambda: arm.observe().captured > first + 3 * 0.04 - 1e-6)
    assert arm.outcome == ""


def test_it_holds_its_target_when_its_driver_is_gone(robot, arm):
    assert np.array_equal(arm.command(AWAY), AWAY)
    wait_until(lambda: arrived(arm))
    arm.disconnect()
    with pytest.raises(DriverError, match="not connected"):
        arm.observe()
    steps = len(seen_by(robot))
    wait_until(lambda: len(seen_by(robot)) > steps + 5)  # it goes on simulating
    arm.connect()
    assert arrived(arm)


def test_killing_who_drives_leaves_the_robot_and_its_cameras(robot, arm):
    arm.disconnect()
    code = (
        f"import sys, time; from robot_drivers.simulated_process import SimulatedArm as A; a = A({robot.address!r}); "
        f"a.connect(); a.command({AWAY.tolist()}); print('sent', flush=True); time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    camera = SimulatedCamera(robot.address, options=OPTIONS)
    camera.open()
    assert driver.stdout.readline() == "sent\n"
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    before = camera.grab()
    after = camera.grab()
    assert after.captured > before.captured and after.image.shape == (16, 16, 3) and robot.process.poll() is None
    arm.connect()
    wait_until(lambda: arrived(arm))
    camera.close()


def test_a_camera_waits_for_the_next_picture(robot):
    camera = SimulatedCamera(robot.address, options=OPTIONS)
    assert isinstance(camera, FrameSource) and camera.spec.fps == pytest.approx(25.0)
    with pytest.raises(CameraError, match="is not open"):
        camera.grab()
    camera.open()
    stamps = [camera.grab().captured for _ in range(4)]
    assert (np.diff(stamps) > 0).all()
    camera.close()
    camera.close()
    with pytest.raises(CameraError, match="no simulated robot answers"):
        SimulatedCamera("/nowhere", options=OPTIONS).open()
    with pytest.raises(UserError, match=r"no camera 'font'.*did you mean 'front'"):
        SimulatedCamera(robot.address, "font", options=OPTIONS)


def steps_since_command(robot):
    return ["command" in line for line in reversed(seen_by(robot))].index(True)


def test_the_record_has_every_command_and_step_with_its_time(robot, arm):
    before = time.monotonic()
    high = np.array([9.0, 0, 0, 1.4, 1.5, 0.5])
    arm.command(high)
    wait_until(lambda: steps_since_command(robot) > 2)
    lines = [line for line in seen_by(robot) if line["time"] >= before]
    commands = [line for line in lines if "command" in line]
    assert len(commands) == 1 and commands[0]["command"][0] == 9.0 and commands[0]["sent"][0] < 2.0
    steps = [line for line in lines if "target" in line and line["time"] > commands[0]["time"]]
    assert steps[-1]["target"] == pytest.approx(commands[0]["sent"]) and len(steps[-1]["position"]) == 6


def test_nonsense_is_refused_and_harms_nobody_else(robot, arm):
    with pytest.raises(ContractError, match="no target of the 6 joints of so101"):
        arm.command(np.full(6, np.nan))
    with pytest.raises(ContractError, match="-1"):
        arm.reset(-1)
    with pytest.raises(ContractError, match="cannot do"):
        arm._connected.ask("dance")
    foreign = socket.socket(socket.AF_UNIX)
    foreign.connect(robot.address)
    foreign.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(robot.address)
    arm.command(AWAY)
    wait_until(lambda: arrived(arm))
    foreign.close()
    silent.close()


def test_a_file_that_says_what_nobody_knows_is_refused():
    with pytest.raises(UserError, match=r"file cannot be read \(.*colour.*it has address"):
        SimulatedProcess(colour="red")
