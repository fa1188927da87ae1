"""Keyboard, leader arm, gamepad and SpaceMouse as teleoperators: what a person does is what is read."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from robot_drivers.driver import DriverError
from robot_drivers.teleop.gamepad import Gamepad, SpaceMouse
from robot_drivers.teleop.keyboard import Foreground, Keyboard
from robot_drivers.teleop.leader import SO101Leader
from robot_drivers.teleop.process import Teleoperator
from tests.patience import PATIENCE, wait_until
from tests.robot_drivers.servo_bus import TICKS, Port, Servos
from tests.robot_drivers.test_so101 import GOLDEN, HERE, PATIENT_MS, TICK
from vla_rl.contract.errors import UserError

LONG = 1e9  # seconds: a key that was pressed counts as held from then on


@pytest.fixture
def opened():
    """Connects a device, which is disconnected at the end, twice."""
    devices = []

    def connect(device):
        assert isinstance(device, Teleoperator)
        devices.append(device)
        device.connect()
        return device

    yield connect
    for device in devices * 2:
        device.disconnect()


@pytest.fixture
def terminal():
    """(path, type keys) of a pseudo-terminal."""
    ours, theirs = os.openpty()
    yield os.ttyname(theirs), lambda keys: os.write(ours, keys.encode())
    os.close(ours)
    os.close(theirs)


def read_until(device, condition):
    """The first input that fulfils ``condition``, and all keys until then: typing takes a moment to arrive."""
    reads = []

    def arrived():
        reads.append(device.read())
        return condition(reads[-1])

    wait_until(arrived)
    return reads[-1], [key for read in reads for key in read.keys]


def test_keys_move_joints_take_over_and_judge(terminal, opened):
    path, press = terminal
    keyboard = opened(Keyboard(joints=3, speed=[0.1, 0.2, 0.3], pulse=LONG, terminal=path))
    before = time.monotonic()
    read = keyboard.read()
    assert not read.engaged and read.velocity.tolist() == [0, 0, 0] and read.keys == () and read.deadman_at is None
    assert before <= read.captured <= time.monotonic()
    press("1x")
    read, _ = read_until(keyboard, lambda read: read.velocity.any())
    assert read.velocity.tolist() == [0.1, -0.2, 0.0] and read.position is None
    press("z4v")  # there is no fourth joint
    read, _ = read_until(keyboard, lambda read: read.velocity[0] < 0)
    assert read.velocity.tolist() == [-0.1, -0.2, 0.0]
    press("s f r a ")
    read, keys = read_until(keyboard, lambda read: "rearm" in read.keys)
    assert keys == ["success", "failure", "redo", "rearm"] and not read.engaged
    press("\rx")
    assert read_until(keyboard, lambda read: read.velocity[1] < 0 and read.keys)[1] == ["ready"]
    press(" ")
    assert read_until(keyboard, lambda read: read.engaged)[0].keys == ()
    press(" ")
    read_until(keyboard, lambda read: not read.engaged)


def test_a_key_counts_for_a_moment(terminal, opened):
    path, press = terminal
    keyboard = opened(Keyboard(joints=1, pulse=0.0, terminal=path))
    press("1s")
    assert read_until(keyboard, lambda read: read.keys)[0].velocity.tolist() == [0.0]


def test_escape_stops_whatever_follows_it(terminal, opened):
    path, press = terminal
    keyboard = opened(Keyboard(joints=3, pulse=LONG, terminal=path))
    for typed in ("\x1b[3~", "\x03"):  # Delete, as a terminal sends it: 3 is no joint here; Ctrl-C
        press(typed)
        read, keys = read_until(keyboard, lambda read: read.keys)
        assert keys == ["stop"] and not read.velocity.any()


def test_a_terminal_is_given_back_as_it_was(terminal):
    path, press = terminal
    end = os.open(path, os.O_RDWR | os.O_NOCTTY)
    before = termios.tcgetattr(end)
    keyboard = Keyboard(terminal=path)
    keyboard.connect()
    assert not termios.tcgetattr(end)[3] & (termios.ECHO | termios.ICANON | termios.ISIG)
    press("x\n")
    assert select.select([end], [], [], PATIENCE)[0]
    keyboard.disconnect()
    assert termios.tcgetattr(end) == before
    assert not select.select([end], [], [], 0)[0]  # what was meant for the arm is not typed into a shell
    os.close(end)


def test_a_program_waits_until_it_has_its_terminal_again(monkeypatch):
    holds = [True, False, False, True, False]
    monkeypatch.setattr(Foreground, "_holds", lambda foreground: holds.pop(0))
    Foreground().wait(PATIENCE)
    assert holds == [False]
    holds[:] = [False, True]
    Foreground().wait(PATIENCE)  # it never had it
    assert holds == [True]


OWNER = """
import os, signal, sys, termios, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a script starts in the background
os.open(sys.argv[1], os.O_RDWR)  # a new session's first terminal is its own
from vla_rl.contract.child import Child
child = Child([sys.executable, "-m", "robot_drivers.teleop.process"], name="control")
options = {"joints": 2, "pulse": 1e9, "speed": 0.5}
child.send({"teleoperator": "robot_drivers.teleop.keyboard:Keyboard", "options": options})
try:
    while True:
        message = child.receive()
        if message["keys"] or message["engaged"]:
            print(message["keys"], message["engaged"], message["velocity"].tolist(), flush=True)
except KeyboardInterrupt:
    child.kill()
    while os.tcgetpgrp(0) != os.getpgrp() or not termios.tcgetattr(0)[3] & termios.ECHO:
        time.sleep(0.01)
    print("interrupted and given back", flush=True)
"""


def test_its_process_has_the_terminal_until_it_is_killed():
    """The program that was started in the terminal is interrupted by Ctrl-C, and gets the terminal back."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", OWNER, os.ttyname(theirs)]
    owner = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    shown = ""

    def until(words: str) -> None:
        nonlocal shown
        end = time.monotonic() + PATIENCE
        while words not in shown:
            assert time.monotonic() < end and owner.poll() is None, shown
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 4096).decode()

    until("space takes over")
    os.write(ours, b" 1xs")
    until("['success'] True [0.5, -0.5]")
    os.write(ours, b"\x03")
    until("interrupted and given back")
    assert owner.wait(PATIENCE) == 0
    os.close(ours)
    os.close(theirs)


def test_a_leader_arm_is_limp_and_read_in_the_followers_units(terminal, opened, capfd):
    (path, press), servos = terminal, Servos()
    servos.put(1, 40, 1)
    with Port(servos.answer) as port:
        leader = opened(SO101Leader(port.path, calibration=str(GOLDEN), terminal=path, timeout_ms=PATIENT_MS))
        assert leader.is_calibrated and all(servos.get(servo, 40) == 0 for servo in TICKS)
        before = time.monotonic()
        read = leader.read()
        assert before <= read.captured <= time.monotonic()
        assert read.position == pytest.approx(HERE, abs=1e-12) and read.velocity is None and not read.engaged
        press(" s1")
        read, keys = read_until(leader, lambda read: read.keys)
        assert read.engaged and keys == ["success"]
        servos.status[2] = 0x04
        for _ in range(2):
            lost = leader.read()
            assert lost.engaged and lost.position is None and lost.velocity is None
        assert capfd.readouterr().err.count("servo 2 reports temperature") == 1
        servos.status[2] = 0
        servos.place(1, TICKS[1] + 100)
        assert leader.read().position[0] == pytest.approx(87.5 * TICK)


def test_a_leader_without_keys_leads_and_uncalibrated_never(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LEROBOT_CALIBRATION", "/c")
    assert SO101Leader("/dev/none", "mine")._servos.path == Path("/c/teleoperators/so101_leader/mine.json")
    with Port(Servos().answer) as port:
        leader = SO101Leader(port.path, calibration=str(GOLDEN), terminal="", timeout_ms=PATIENT_MS)
        leader.connect()
        assert leader.read().engaged
        leader.disconnect()
        unknown = str(tmp_path / "none.json")
        leader = opened(SO101Leader(port.path, calibration=unknown, terminal="", timeout_ms=PATIENT_MS))
        with pytest.raises(UserError, match="there is no calibration"):
            leader.read()


# Events of a joystick as the kernel's documentation lays them out, written by hand: milliseconds, value, type, number.
PRESS_LB = bytes.fromhex("10 27 00 00 01 00 01 04")
RELEASE_LB = bytes.fromhex("74 27 00 00 00 00 01 04")
STICK_LEFT = bytes.fromhex("20 27 00 00 01 80 02 00")  # axis 0 at -32767
STICK_HALF = bytes.fromhex("30 27 00 00 00 40 02 00")  # axis 0 at 16384
STICK_NEAR = bytes.fromhex("40 27 00 00 00 08 02 00")  # axis 0 at 2048
CAP_TURNED = bytes.fromhex("50 27 00 00 01 80 02 05")  # axis 5 at -32767
PRESS_A = bytes.fromhex("60 27 00 00 01 00 01 00")
PRESS_B = bytes.fromhex("60 27 00 00 01 00 01 01")
HELD_A_AT_FIRST = bytes.fromhex("00 27 00 00 01 00 81 00")


@pytest.fixture
def joystick(tmp_path):
    """(a device, a way to let events happen)."""
    path = tmp_path / "js0"
    os.mkfifo(path)
    writers = []

    def happen(*events: bytes) -> None:
        if not writers:
            writers.append(os.open(path, os.O_WRONLY))
        os.write(writers[0], b"".join(events))

    yield str(path), happen
    for writer in writers:
        os.close(writer)


def test_a_gamepad_moves_while_its_enabling_button_is_held(joystick, opened):
    path, happen = joystick
    pad = opened(Gamepad(path, axes=[(0, 0.5), (3, 1.0)]))
    read = pad.read()
    assert not read.engaged and read.deadman_at is None and read.velocity.tolist() == [0, 0]
    happen(PRESS_LB, STICK_LEFT)
    read = pad.read()
    assert read.engaged and read.velocity.tolist() == [-0.5, 0.0]
    assert read.deadman_at == read.captured
    happen(STICK_HALF)
    assert pad.read().velocity[0] == pytest.approx(0.5 * (16384 / 32767 - 0.1) / 0.9)
    happen(STICK_NEAR)
    pressed = pad.read()
    assert pressed.velocity.tolist() == [0.0, 0.0]
    happen(RELEASE_LB)
    released = pad.read()
    assert not released.engaged and pressed.deadman_at <= released.deadman_at < released.captured
    happen(STICK_LEFT)
    assert not pad.read().engaged


def test_buttons_are_events_once_when_they_are_pressed(joystick, opened):
    path, happen = joystick
    pad = opened(Gamepad(path))
    happen(HELD_A_AT_FIRST, PRESS_B, PRESS_A[:5])
    assert pad.read().keys == ("stop",)
    happen(PRESS_A[5:])
    assert pad.read().keys == ("success",)
    assert pad.read().keys == ()


def test_whoever_pushes_a_spacemouse_has_control(joystick, opened):
    path, happen = joystick
    mouse = opened(SpaceMouse(path, axes=[(0, 0.5), (5, 1.0)]))
    assert not mouse.read().engaged
    happen(CAP_TURNED)
    read = mouse.read()
    assert read.engaged and read.velocity.tolist() == [0.0, -1.0] and read.deadman_at is None


def test_a_joystick_that_is_gone_says_so(joystick, opened, monkeypatch):
    pad = opened(Gamepad(joystick[0]))

    def gone(end: int, size: int) -> bytes:
        raise OSError(errno.ENODEV, "No such device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", gone)
        with pytest.raises(DriverError, match="is gone"):
            pad.read()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Keyboard(terminal="/no/such/tty").connect(), "is no terminal here"),
        (lambda: Keyboard(terminal=__file__).connect(), "is no terminal here"),
        (lambda: Keyboard(joints=8), "joints=8"),
        (lambda: Keyboard(joints=3, speed=[1.0, 2.0]), "speed has 2 entries for 3 joints"),
        (lambda: Gamepad("/dev/input/none").connect(), "/dev/input/none"),
        (lambda: Gamepad(buttons={"jump": 1}), "buttons have jump"),
        (lambda: Gamepad(dead=1.0), "dead=1"),
    ],
)
def test_a_device_that_is_missing_or_described_wrongly_is_named(make, says):
    with pytest.raises(UserError, match=says):
        make()


def test_the_defaults_have_an_axis_for_every_joint():
    for device in (Gamepad(), SpaceMouse()):
        assert len(set(device._axes)) == len(device._speed) == 6 and np.all(device._speed)
