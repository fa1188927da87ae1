"""An environment as a robot: what is late, lost or noisy is so as asked for; as a process it goes on whoever dies."""

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
from robot_drivers.driver import DriverError, Measurement, Resets, RobotDriver, open_driver
from robot_drivers.limits import Limits
from robot_drivers.safety import Request, Supervisor
from robot_drivers.simulated import Imperfections, SimulatedRobot
from robot_drivers.simulated_process import SimulatedArm, SimulatedCamera
from sims.catalog import make
from sims.mujoco.tasks.so101 import So101Expert
from tests.patience import PATIENCE, wait_until
from tests.robot_drivers.simulated_robot import SimulatedProcess
from vla_rl.contract.errors import ContractError, UserError

DT = 0.04
STATE_ONLY = {"render": False, "threads": 1}
AWAY = np.array([0.2, 0.0, 0.0, 1.4, 1.5, 0.5])


@pytest.fixture
def robot():
    """Makes connected robots: of imperfections, with further options of the environment."""
    made = []

    def build(options=None, **imperfections):
        made.append(SimulatedRobot(options={**STATE_ONLY, **(options or {})}, imperfections=imperfections))
        made[-1].connect()
        made[-1].reset(3)
        return made[-1]

    yield build
    for item in made:
        item.disconnect()


def positions(robot, commands):
    """What is measured after each of the commands."""
    found = []
    for command in commands:
        robot.command(command)
        found.append(robot.observe().position)
    return np.stack(found)


def test_it_is_a_driver_known_before_it_connects():
    robot = open_driver("robot_drivers.simulated:SimulatedRobot", {"options": {"control_hz": 50, **STATE_ONLY}})
    assert isinstance(robot, RobotDriver) and not robot.is_connected
    assert robot.spec.names[:2] == ("shoulder_pan.pos", "shoulder_lift.pos") and robot.spec.control_hz == 50
    assert robot.spec.joints[0].high == pytest.approx(1.91986) and robot.spec.joints[5].unit == "1"
    with pytest.raises(DriverError, match="not connected"):
        robot.observe()
    robot.connect()
    assert robot.is_connected and isinstance(robot, Resets)
    robot.disconnect()
    robot.disconnect()
    assert not robot.is_connected


def test_what_is_no_simulated_arm_is_refused():
    with pytest.raises(ContractError, match=r"lift:make takes dx, dy, dz, grip and measures x, y,.*cannot stand for"):
        SimulatedRobot("sims.mujoco.tasks.lift:make")
    with pytest.raises(UserError, match="no option 'control_herz'"):
        SimulatedRobot(options={"control_herz": 25})
    with pytest.raises(UserError, match=r"lost_frames is 1\.5"):
        Imperfections(lost_frames=1.5)
    robot = SimulatedRobot(options=STATE_ONLY, imperfections={"offsets": [0.1]})
    with pytest.raises(ContractError, match="1 offsets do not fit an arm of 6 joints"):
        robot.connect()


def test_a_target_is_clipped_and_nonsense_is_refused(robot):
    arm = robot()
    sent = arm.command(np.array([9.0, 0, 0, 1.5, 0, -1.0]))
    assert sent[0] == arm.spec.joints[0].high and sent[5] == 0.0 and sent[3] == 1.5
    for wrong in (np.full(6, np.nan), np.zeros(5)):
        with pytest.raises(ContractError, match="no target of the 6 joints of so101"):
            arm.command(wrong)


def test_without_imperfections_it_is_the_environment(robot):
    arm, env = robot(), make("so101", num_envs=1, **STATE_ONLY)
    env.reset([0], [3])
    commands = AWAY + np.linspace(0, 0.3, 20)[:, None]
    expected = [env.step(command.astype(np.float32)[None, None]).obs.state[0] for command in commands]
    assert np.array_equal(positions(arm, commands), np.asarray(expected, np.float64))
    env.close()


def test_time_is_that_of_commands_or_of_the_callers_clock(robot):
    arm = robot()
    assert arm.observe().captured == 0.0
    positions(arm, [AWAY] * 3)
    assert arm.observe().captured == pytest.approx(3 * DT)
    arm.reset(4)
    assert arm.observe().captured == pytest.approx(3 * DT)  # it does not start again
    now = [7.0]
    arm = SimulatedRobot(options=STATE_ONLY, clock=lambda: now[0])
    arm.connect()
    arm.command(AWAY)
    assert arm.observe().captured == 7.0  # nothing has passed
    now[0] += DT
    assert arm.observe().captured == pytest.approx(7.0 + DT)
    arm.disconnect()


def test_equal_seeds_are_equal_episodes_and_others_are_not(robot):
    flaws = {"noise": 0.01, "jitter": 0.1, "command_latency": 0.05, "measurement_latency": 0.05, "lost_frames": 0.2}
    commands = AWAY + np.linspace(0, 0.3, 15)[:, None]
    first, second, other = (positions(robot(**flaws, seed=seed), commands) for seed in (1, 1, 2))
    assert np.array_equal(first, second) and not np.array_equal(first, other)


@pytest.mark.parametrize(("latency", "steps"), [(0.0, 0), (DT, 1), (2.4 * DT, 3)])
def test_a_command_moves_the_arm_after_its_latency(robot, latency, steps):
    arm = robot(command_latency=latency)
    start = arm.observe().position
    moved = np.abs(positions(arm, [start + 0.2] * 6) - start)[:, 0] > 0.02
    assert moved.tolist() == [False] * steps + [True] * (6 - steps)


def test_a_measurement_is_as_old_as_it_says(robot):
    late, commands = robot(measurement_latency=2 * DT), AWAY + np.linspace(0, 0.3, 8)[:, None]
    truth = positions(robot(), commands)
    for i, command in enumerate(commands):
        late.command(command)
        seen = late.observe()
        assert seen.captured == pytest.approx(max(0, i - 1) * DT)
        assert i < 2 or np.array_equal(seen.position, truth[i - 2])


def test_jitter_never_puts_commands_or_measurements_out_of_order(robot):
    arm = robot(jitter=3 * DT)
    commands = AWAY + np.linspace(0, 0.4, 40)[:, None]
    stamps, targets = [], []
    for command in commands:
        arm.command(command)
        stamps.append(arm.observe().captured)
        targets.append(arm._hardware.target[0])
    assert (np.diff(stamps) >= 0).all() and (np.diff(targets[3:]) >= 0).all() and targets[-1] > 0.5
    age = np.arange(1, 41) - np.array(stamps) / DT
    assert age.min() == pytest.approx(1.0) and age.max() == pytest.approx(3.0)


def test_noise_and_offsets_are_as_stated(robot):
    offsets = (0.05, -0.03, 0.0, 0.0, 0.0, 0.0)
    arm = robot(noise=0.02, offsets=offsets)
    measured = positions(arm, [AWAY] * 120)[20:] - AWAY
    assert np.allclose(measured.std(0), 0.02, rtol=0.3) and np.abs(measured.mean(0)).max() < 0.012
    true = arm._hardware.truth().state[0]
    assert np.allclose(true[:2] - AWAY[:2], [-0.05, 0.03], atol=0.012)


def test_a_lost_measurement_is_no_answer_and_the_arm_goes_on(robot):
    arm, lost = robot(lost_measurements=0.4), 0
    for _ in range(60):
        arm.command(AWAY)
        try:
            arm.observe()
        except DriverError as error:
            lost += "no answer" in str(error)
    assert 10 < lost < 40
    assert np.allclose(arm._hardware.truth().state[0], AWAY, atol=0.02)


def test_pictures_are_late_and_lost_as_stated(robot):
    arm = robot({"render": True, "image_size": 16}, camera_latency=2 * DT, lost_frames=0.5)
    taken = []
    for _ in range(30):
        arm.command(AWAY)
        images, captured = arm.pictures()
        assert images["front"].shape == (16, 16, 3)
        taken.append(captured)
    age = np.arange(1, 31)[4:] - np.array(taken)[4:] / DT
    assert (np.diff(taken) >= 0).all() and age.min() == pytest.approx(2.0) and age.max() > 2.5


def test_the_expert_picks_up_the_cube_through_the_driver(robot):
    arm, expert, step = robot(), So101Expert(), 0
    while not arm.outcome:
        arm.command(expert.act(arm.observation(arm.observe(), step))[0, 0])
        step += 1
    assert arm.outcome == "success"
    still = arm.observe().position
    arm.command(AWAY)
    assert np.array_equal(arm.observe().position, still)  # until the next reset


def test_an_observation_is_a_policys(robot):
    arm = robot({"render": True, "image_size": 16})
    obs = arm.observation(Measurement(np.full(6, 99.0), None, 0.0), 5)
    assert obs.images["front"].shape == (1, 16, 16, 3) and obs.time.tolist() == [5] and obs.task.tolist() == [0]
    assert obs.state.dtype == np.float32 and (obs.state[0] <= np.float32(arm.env_spec.state.high)).all()


def test_a_change_of_speed_within_the_limits_is_followed_exactly():
    """Constant speed, then 0.6 rad/s more from one control step to the next: 15 of 50 rad/s²."""
    supervisor = Supervisor(Limits.of(SimulatedRobot(options=STATE_ONLY).spec))
    path = AWAY + np.outer(np.cumsum([0.0, 0.0, 0.0, *[0.6 * DT] * 4]), [1.0, 0, 0, 0, 0, 0])
    for step, target in enumerate(path):
        now = step * DT
        measured = Measurement(path[max(step - 1, 0)], None, now)
        command = supervisor.step(measured, Request(target, now, "policy"), now)
        assert not command.clipped.any(), step


OPTIONS = {"image_size": 16, "threads": 1, "seconds": 3600}


@pytest.fixture(scope="module")
def process(tmp_path_factory):
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
def arm(process):
    """Its connected driver, at the start of an episode."""
    made = SimulatedArm(process.address, options=OPTIONS)
    made.connect()
    made.reset(3)
    yield made
    made.disconnect()


def arrived(arm):
    return np.abs(arm.observe().position - AWAY).max() < 0.02


def seen_by(process):
    """The lines of the record that are complete."""
    return [json.loads(line) for line in process.record.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_it_is_a_driver_whose_measurements_are_fresh(arm):
    assert isinstance(arm, RobotDriver) and isinstance(arm, Resets)
    first = arm.observe().captured
    assert first <= time.monotonic()
    wait_until(lambda: arm.observe().captured > first + 3 * 0.04 - 1e-6)
    assert arm.outcome == ""


def test_it_holds_its_target_when_its_driver_is_gone(process, arm):
    assert np.array_equal(arm.command(AWAY), AWAY)
    wait_until(lambda: arrived(arm))
    arm.disconnect()
    with pytest.raises(DriverError, match="not connected"):
        arm.observe()
    steps = len(seen_by(process))
    wait_until(lambda: len(seen_by(process)) > steps + 5)  # it goes on simulating
    arm.connect()
    assert arrived(arm)


def test_killing_who_drives_leaves_the_robot_and_its_cameras(process, arm):
    arm.disconnect()
    code = (
        f"import sys, time; from robot_drivers.simulated_process import SimulatedArm as A; a = A({process.address!r}); "
        f"a.connect(); a.command({AWAY.tolist()}); print('sent', flush=True); time.sleep(600)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    camera = SimulatedCamera(process.address, options=OPTIONS)
    camera.open()
    assert driver.stdout.readline() == "sent\n"
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    before = camera.grab()
    after = camera.grab()
    assert after.captured > before.captured and after.image.shape == (16, 16, 3) and process.process.poll() is None
    arm.connect()
    wait_until(lambda: arrived(arm))
    camera.close()


def test_a_camera_waits_for_the_next_picture(process):
    camera = SimulatedCamera(process.address, options=OPTIONS)
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
        SimulatedCamera(process.address, "font", options=OPTIONS)


def steps_since_command(process):
    return ["command" in line for line in reversed(seen_by(process))].index(True)


def test_the_record_has_every_command_and_step_with_its_time(process, arm):
    before = time.monotonic()
    high = np.array([9.0, 0, 0, 1.4, 1.5, 0.5])
    arm.command(high)
    wait_until(lambda: steps_since_command(process) > 2)
    lines = [line for line in seen_by(process) if line["time"] >= before]
    commands = [line for line in lines if "command" in line]
    assert len(commands) == 1 and commands[0]["command"][0] == 9.0 and commands[0]["sent"][0] < 2.0
    steps = [line for line in lines if "target" in line and line["time"] > commands[0]["time"]]
    assert steps[-1]["target"] == pytest.approx(commands[0]["sent"]) and len(steps[-1]["position"]) == 6


def test_nonsense_is_refused_and_harms_nobody_else(process, arm):
    with pytest.raises(ContractError, match="no target of the 6 joints of so101"):
        arm.command(np.full(6, np.nan))
    with pytest.raises(ContractError, match="-1"):
        arm.reset(-1)
    with pytest.raises(ContractError, match="cannot do"):
        arm._connected.ask("dance")
    foreign = socket.socket(socket.AF_UNIX)
    foreign.connect(process.address)
    foreign.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(process.address)
    arm.command(AWAY)
    wait_until(lambda: arrived(arm))
    foreign.close()
    silent.close()


def test_a_file_that_says_what_nobody_knows_is_refused():
    with pytest.raises(UserError, match=r"cannot be read \(.*colour.*it has address"):
        SimulatedProcess(colour="red")
