"""Frames and the bus of Feetech servos, byte by byte, and the SO-101's driver, through a real pseudo-terminal."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from robot_drivers import feetech
from robot_drivers.driver import Calibrates, DriverError, open_driver
from robot_drivers.feetech import Bus, Register, StatusError
from robot_drivers.so101 import (
    GRIPPER,
    IDS,
    JOINTS,
    SO101,
    MotorCalibration,
    Scale,
    default_path,
    load_calibration,
    save_calibration,
)
from tests.patience import wait_until
from tests.robot_drivers.servo_bus import RANGES, TICKS, Hasty, Port, Servos, sealed
from vla_rl.contract.errors import ContractError, UserError

GOLDEN = Path(__file__).parent / "golden" / "so101.json"  # written by lerobot 0.4.4 (draccus.dump, indent 4)
PATIENT_MS, HASTY_MS = 60_000.0, 100.0
TICK = math.tau / 4095
HERE = np.array([-12.5 * TICK, -832 * TICK, 930 * TICK, 0.0, -0.5 * TICK, 366 / 1465])  # TICKS in positions


# Written by hand from the protocol's description: request, answer.
FRAMES = {
    "read Present_Velocity of 2": ("ff ff 02 04 02 3a 02 bb", "ff ff 02 04 00 2c 81 4c"),
    "write Homing_Offset of 1": ("ff ff 01 05 03 1f 41 0d 89", "ff ff 01 02 00 fc"),
    "write Max_Torque_Limit of 6": ("ff ff 06 05 03 10 f4 01 ec", "ff ff 06 02 00 f7"),
    "sync read position and velocity of 1 and 2": (
        "ff ff fe 06 82 38 04 01 02 3a",
        "ff ff 01 06 00 ff 07 64 00 8e ff ff 02 06 00 01 10 64 80 02",
    ),
}
# Written by lerobot 0.4.4's FeetechMotorsBus to a pseudo-terminal: sync_write("Goal_Position", ...) of raw ticks
# [1600, 2373, 2993, 2054, 113, 2400] for the motors 1 to 6, and of -300 for motor 1.
LEROBOT_GOALS = "ff ff fe 16 83 2a 02 01 40 06 02 45 09 03 b1 0b 04 06 08 05 71 00 06 60 09 ef"
LEROBOT_NEGATIVE_GOAL = "ff ff fe 07 83 2a 02 01 2c 81 9d"
# And its sync_read("Present_Position") of six motors.
LEROBOT_SYNC_READ = "ff ff fe 0a 82 38 02 01 02 03 04 05 06 26"


def raw(text: str) -> bytes:
    return bytes.fromhex(text)


def replay(*names: str):
    answers = {raw(request): raw(answer) for request, answer in (FRAMES[name] for name in names)}
    return Port(lambda request: answers.get(request, b""))


@pytest.fixture
def bus_at():
    opened = []

    def open_bus(path: str, timeout: float = PATIENT_MS / 1e3, retries: int = 2) -> Bus:
        bus = Bus(path, timeout, retries)
        bus.open()
        opened.append(bus)
        return bus

    yield open_bus
    for bus in opened:
        bus.close()


def test_golden_frames_are_sent_and_understood(bus_at):
    with replay(*FRAMES) as port:
        bus = bus_at(port.path)
        assert bus.read(2, feetech.PRESENT_VELOCITY) == -300
        bus.write(1, feetech.HOMING_OFFSET, -1345)
        bus.write(6, feetech.MAX_TORQUE_LIMIT, 500)
        answers = bus.sync_read([1, 2], (feetech.PRESENT_POSITION, feetech.PRESENT_VELOCITY))
    assert [(answer.values, answer.status) for answer in answers] == [((2047, 100), 0), ((4097, -100), 0)]
    assert port.requests == [raw(request) for request, _ in FRAMES.values()]


def test_requests_are_lerobots_byte_by_byte(bus_at):
    servos = Servos()
    with Port(servos.answer) as port:
        bus = bus_at(port.path)
        bus.sync_write(feetech.GOAL_POSITION, dict(zip(range(1, 7), [1600, 2373, 2993, 2054, 113, 2400], strict=True)))
        bus.sync_write(feetech.GOAL_POSITION, {1: -300})
        bus.sync_read(range(1, 7), [feetech.PRESENT_POSITION])
    assert port.requests == [raw(LEROBOT_GOALS), raw(LEROBOT_NEGATIVE_GOAL), raw(LEROBOT_SYNC_READ)]


@pytest.mark.parametrize("register", [feetech.HOMING_OFFSET, feetech.GOAL_POSITION, feetech.MAX_TORQUE_LIMIT])
def test_numbers_come_back_and_those_that_do_not_fit_are_refused(register: Register):
    top = (1 << (register.sign or 16)) - 1
    for value in (0, 1, top, *((-1, -top) if register.sign else ())):
        assert register.decode(register.encode(value)) == value
    for value in (top + 1, -top - 1) if register.sign else (top + 1, -1):
        with pytest.raises(DriverError, match=register.name):
            register.encode(value)


WRONG = {
    "corrupted": (lambda answer: answer[:-2] + bytes([answer[-2] ^ 1, answer[-1]]), "wrong checksum"),
    "cut short": (lambda answer: answer[:-3], "ended after 5 of 8 bytes"),
    "of another servo": (lambda answer: sealed(answer[2] + 3, *answer[3:-1]), "servo 5 answered in place of servo 2"),
    "of another length": (lambda answer: sealed(answer[2], answer[3] + 1, *answer[4:-1]), "length 5 instead of 4"),
    "shifted": (lambda answer: b"\x00" + answer, "begins with 00 ff instead of ff ff"),
    "missing": (lambda answer: b"", "servo 2 did not answer"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_refused_after_three_tries(wrong, bus_at, monkeypatch):
    servos = Servos()
    servos.spoil, reason = WRONG[wrong]
    with Port(servos.answer) as port:
        Hasty(monkeypatch, port)
        bus = bus_at(port.path, HASTY_MS / 1e3 if reason.endswith(("bytes", "answer")) else PATIENT_MS / 1e3)
        with pytest.raises(DriverError, match=rf"Present_Position 3 times, but .*{reason}"):
            bus.read(2, feetech.PRESENT_POSITION)
    assert len(port.requests) == 3


def test_one_wrong_answer_is_asked_for_again(bus_at):
    servos, answers = Servos(), list[bytes]()

    def once(answer: bytes) -> bytes:
        answers.append(answer)
        return WRONG["corrupted"][0](answer) if len(answers) == 1 else answer

    servos.spoil = once
    with Port(servos.answer) as port:
        assert bus_at(port.path).read(2, feetech.PRESENT_POSITION) == 1200
    assert len(port.requests) == 2


def test_a_silent_servo_among_others_is_named(bus_at, monkeypatch):
    servos = Servos()
    with Port(servos.answer) as port:
        Hasty(monkeypatch, port)
        bus = bus_at(port.path, HASTY_MS / 1e3, retries=0)
        for silent, says in ((3, "servo 4 answered in place of servo 3"), (6, "servo 6 did not answer")):
            servos.silent = {silent}
            with pytest.raises(DriverError, match=says):
                bus.sync_read(range(1, 7), [feetech.PRESENT_POSITION])


def test_what_nobody_waited_for_is_not_taken_for_an_answer(bus_at):
    servos = Servos()
    servos.spoil = lambda answer: answer + sealed(2, 4, 0, 0xE7, 0x03)  # 999, as of an earlier request
    with Port(servos.answer) as port:
        bus = bus_at(port.path)
        assert [bus.read(2, feetech.PRESENT_POSITION) for _ in range(3)] == [1200] * 3


@pytest.mark.parametrize(
    ("status", "word"), [(0x20, "overload"), (0x05, "voltage and temperature"), (0x40, "status 0x40")]
)
def test_a_servo_in_trouble_says_so_at_once(status, word, bus_at):
    servos = Servos()
    servos.status[2] = status
    with Port(servos.answer) as port:
        bus = bus_at(port.path)
        for ask in (lambda: bus.read(2, feetech.PHASE), lambda: bus.write(2, feetech.LOCK, 1)):
            with pytest.raises(StatusError, match=f"servo 2 reports {word}"):
                ask()
        assert bus.sync_read([1, 2], [feetech.LOCK])[1] == feetech.Answer((1,), status)
    assert len(port.requests) == 3


def test_a_port_belongs_to_one_program_and_its_loss_is_told(bus_at):
    with Port(Servos().answer) as port:
        bus = bus_at(port.path)
        with pytest.raises(UserError, match="cannot be opened"):
            Bus(port.path).open()
        with pytest.raises(DriverError, match="is not open"):
            Bus(port.path).read(1, feetech.PHASE)
    with pytest.raises(DriverError, match="is lost"):
        bus.read(1, feetech.PHASE)
    with pytest.raises(UserError, match="no/such/port"):
        Bus("/no/such/port").open()
    with pytest.raises(DriverError, match="does not follow"):
        bus.sync_read([1], [feetech.PRESENT_POSITION, feetech.GOAL_POSITION])


def test_lerobots_file_is_read_and_written_byte_by_byte(tmp_path):
    calibration = load_calibration(GOLDEN, JOINTS)
    assert list(calibration) == list(JOINTS)
    assert calibration["shoulder_pan"] == MotorCalibration(1, 0, -1345, 741, 3484)
    save_calibration(tmp_path / "folder" / "so101.json", calibration)
    assert (tmp_path / "folder" / "so101.json").read_bytes() == GOLDEN.read_bytes()


def test_angles_are_lerobots_degrees_in_radians():
    """lerobot 0.4.4 sends these ticks for -45°, 30°, 90°, 0°, -170° and 25 %, and cuts fractions off; we round."""
    scale = Scale(load_calibration(GOLDEN, JOINTS), GRIPPER)
    position = np.array([*np.radians([-45.0, 30.0, 90.0, 0.0, -170.0]), 0.25])
    assert scale.ticks(position).tolist() == [1601, 2373, 2994, 2054, 114, 2400]
    lerobots = [1600, 2373, 2993, 2054, 113, 2400]
    assert np.abs(scale.ticks(position) - lerobots).max() <= 1
    assert scale.position(np.array([741, 837, 3081, 2054, 0, 2034])) == pytest.approx(
        [-1371.5 * math.tau / 4095, -1195 * math.tau / 4095, 1111 * math.tau / 4095, 0.0, -math.pi, 0.0], abs=1e-12
    )
    assert scale.velocity(np.array([4095.0, -4095.0, 0.0, 0.0, 0.0, 1465.0])) == pytest.approx(
        [math.tau, -math.tau, 0.0, 0.0, 0.0, 1.0]
    )


def test_every_tick_comes_back_and_targets_stay_in_range():
    scale = Scale(load_calibration(GOLDEN, JOINTS), GRIPPER)
    low, high = np.array([741, 837, 859, 878, 0, 2034]), np.array([3484, 3227, 3081, 3230, 4095, 3499])
    for share in np.linspace(0.0, 1.0, 97):
        ticks = np.rint(low + share * (high - low)).astype(int)
        assert scale.ticks(scale.position(ticks)).tolist() == ticks.tolist()
    assert scale.ticks(np.full(6, -9.0)).tolist() == low.tolist()
    assert scale.ticks(np.full(6, 9.0)).tolist() == high.tolist()


def test_a_gripper_may_be_inverted_and_is_never_more_than_closed(tmp_path):
    calibration = load_calibration(GOLDEN, JOINTS)
    inverted = {**calibration, "gripper": MotorCalibration(6, 1, 1478, 2034, 3499)}
    for entries, opening in ((calibration, 0.0), (inverted, 1.0)):
        scale = Scale(entries, GRIPPER)
        assert scale.position(np.full(6, 2000))[GRIPPER] == opening
        assert scale.ticks(np.full(6, opening))[GRIPPER] == 2034
        assert scale.ticks(np.full(6, 1 - opening))[GRIPPER] == 3499


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("gripper"), "is not about shoulder_pan"),
        (lambda found: found["gripper"].update(range_max=2034), "'gripper' goes from 2034 to 2034"),
        (lambda found: found["gripper"].update(range_max=4096), "'gripper' goes from 2034 to 4096"),
        (lambda found: found["gripper"].update(id=6.0), "'gripper' does not hold the whole numbers id"),
    ],
)
def test_a_file_of_something_else_is_refused(change, words, tmp_path):
    found = json.loads(GOLDEN.read_text())
    change(found)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=words):
        load_calibration(path, JOINTS)
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_calibration(path, JOINTS)


def test_it_lies_where_lerobot_keeps_it(tmp_path, monkeypatch):
    variables = ("HF_HOME", "HF_LEROBOT_HOME", "HF_LEROBOT_CALIBRATION")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = ("robots/so101_follower", "robots/so_follower")
    root = tmp_path / ".cache" / "huggingface" / "lerobot" / "calibration" / "robots"
    assert default_path(folders, "mine") == root / "so101_follower" / "mine.json"
    newer = root / "so_follower" / "mine.json"
    newer.parent.mkdir(parents=True)
    newer.write_text("{}")
    assert default_path(folders, "mine") == newer
    for variable, folder in zip(variables, ("/a/lerobot/calibration", "/a/calibration", "/a"), strict=True):
        monkeypatch.setenv(variable, "/a")
        assert default_path(folders, "mine") == Path(folder, "robots/so101_follower/mine.json")


@pytest.fixture
def servos():
    return Servos()


@pytest.fixture
def port(servos):
    with Port(servos.answer) as port:
        yield port


def arm_at(port: Port, calibration: Path = GOLDEN, **options: bool) -> SO101:
    arm = SO101(port.path, calibration=str(calibration), timeout_ms=PATIENT_MS, **options)
    arm.connect()
    return arm


@pytest.fixture
def arm(port):
    arm = arm_at(port)
    yield arm
    arm._servos.bus.close()


def writes(port: Port) -> list[bytes]:
    """The requests that change something."""
    return [request for request in port.requests if request[4] in (0x03, 0x83)]


def test_it_knows_its_joints_before_it_is_connected():
    arm = open_driver("robot_drivers.so101:SO101", {"port": "/dev/none", "calibration": str(GOLDEN)})
    assert isinstance(arm, Calibrates) and not arm.is_connected
    assert arm.spec.names == tuple(f"{joint}.pos" for joint in JOINTS)
    assert arm.spec.position.unit == "rad, rad, rad, rad, rad, 1"
    highs = [joint.high for joint in arm.spec.joints]
    assert highs == pytest.approx([1371.5 * TICK, 1195 * TICK, 1111 * TICK, 1176 * TICK, 2.74385, 1.0])
    lows = [joint.low for joint in arm.spec.joints]
    assert lows == pytest.approx([*(-high for high in highs[:-1]), 0.0])
    assert arm.spec.joints[-1].velocity == pytest.approx(4.71 / (1465 * TICK))
    new = SO101("/dev/none", calibration="/no/such/file.json")
    assert [joint.high for joint in new.spec.joints] == [1.91986, 1.74533, 1.69, 1.65806, 2.74385, 1.0]


def test_connecting_sets_what_lerobot_sets_and_moves_nothing(arm, servos, port):
    assert arm.is_connected and arm.is_calibrated
    for servo in IDS:
        values = [servos.get(servo, address) for address in (7, 21, 22, 23, 33, 41, 85)]
        assert values == [0, 16, 32, 0, 0, 254, 254]
        gripper = [servos.get(servo, 16, 2), servos.get(servo, 28, 2), servos.get(servo, 36)]
        assert gripper == ([500, 250, 25] if servo == 6 else [0, 0, 0])
        assert servos.get(servo, 40) == 0
    assert not any(request[5] == feetech.GOAL_POSITION.address for request in writes(port))
    arm.disconnect()
    port.requests.clear()
    arm.connect()
    assert not writes(port), "what is right is not written again"
    arm.disconnect()


def test_it_measures_positions_and_velocities(arm, servos):
    servos.place(1, TICKS[1], 652)
    servos.place(5, TICKS[5], -4095)
    before = time.monotonic()
    found = arm.observe()
    assert before <= found.captured <= time.monotonic()
    assert found.position == pytest.approx(HERE, abs=1e-12)
    assert found.velocity == pytest.approx([652 * TICK, 0, 0, 0, -math.tau, 0])
    assert found.position.dtype == found.velocity.dtype == np.float64
    assert found.extras["status"].tolist() == [0] * 6


def test_speeds_in_steps_of_fifty_ticks_are_understood(servos, port):
    servos.place(1, TICKS[1], 10)
    servos.put(1, 18, 8)
    arm = arm_at(port)
    assert arm.observe().velocity[0] == pytest.approx(500 * TICK)
    arm.disconnect()


def test_the_first_command_switches_torque_on_where_the_arm_is(arm, port):
    port.requests.clear()
    target = HERE + np.array([0.1, -0.1, 0.0, 0.0, 0.0, 0.5])
    sent = arm.command(target)
    assert sent == pytest.approx(target, abs=TICK)
    goals = {servo: TICKS[servo] for servo in IDS}
    moved = {**goals, 1: 2165, 2: 1135, 6: 3132}
    wait_until(lambda: len(writes(port)) == 4)
    assert writes(port) == [
        sealed(0xFE, 22, 0x83, 42, 2, *(byte for n in IDS for byte in (n, goals[n] & 0xFF, goals[n] >> 8))),
        sealed(0xFE, 16, 0x83, 40, 1, *(byte for n in IDS for byte in (n, 1))),
        sealed(0xFE, 16, 0x83, 55, 1, *(byte for n in IDS for byte in (n, 1))),
        sealed(0xFE, 22, 0x83, 42, 2, *(byte for n in IDS for byte in (n, moved[n] & 0xFF, moved[n] >> 8))),
    ]
    port.requests.clear()
    arm.command(target)
    wait_until(lambda: port.requests)
    assert [request[5] for request in port.requests] == [42], "later commands are one frame"


def test_a_target_is_kept_in_range_and_nonsense_is_not_sent(arm, port):
    sent = arm.command(np.array([9.0, -9.0, 0.0, 0.0, 0.0, 2.0]))
    assert sent == pytest.approx([1371.5 * TICK, -1195 * TICK, 0, 0, -0.5 * TICK, 1.0], abs=TICK)
    arm.observe()  # is answered, so what came before it has arrived
    port.requests.clear()
    for wrong in (np.zeros(5), np.array([0, 0, np.nan, 0, 0, 0]), np.array([0, 0, np.inf, 0, 0, 0])):
        with pytest.raises(ContractError, match="no target of the 6 joints of so101"):
            arm.command(wrong)
    assert not port.requests


def test_it_goes_limp_at_the_end_unless_it_is_to_be_held(servos, port):
    for limp in (True, False):
        arm = arm_at(port, disable_torque_on_disconnect=limp)
        arm.command(HERE)
        wait_until(lambda: all(servos.get(servo, 55) for servo in IDS))
        arm.disconnect()
        arm.disconnect()
        assert not arm.is_connected
        assert {(servos.get(servo, 40), servos.get(servo, 55)) for servo in IDS} == {(0, 0) if limp else (1, 1)}


def test_all_other_servos_go_limp_when_one_is_silent(servos, port, monkeypatch):
    Hasty(monkeypatch, port)
    arm = arm_at(port)
    arm.command(HERE)
    wait_until(lambda: all(servos.get(servo, 55) for servo in IDS))
    servos.silent, servos.status[4] = {2}, 0x20
    arm._servos.bus._serial.timeout = HASTY_MS / 1e3
    with pytest.raises(DriverError, match=r"Torque_Enable = 0 3 times, but servo 2"):
        arm.disconnect()
    assert not arm.is_connected
    assert all(servos.get(servo, 40) == 0 for servo in IDS if servo != 2)


def test_a_gripper_that_holds_something_is_no_failure(arm, servos):
    servos.status[6] = 0x20
    assert arm.observe().extras["status"].tolist() == [0, 0, 0, 0, 0, 0x20]
    servos.status[6] = 0x24
    with pytest.raises(StatusError, match="servo 6 reports temperature and overload"):
        arm.observe()
    servos.status.update({6: 0, 2: 0x20})
    with pytest.raises(StatusError, match="servo 2 reports overload"):
        arm.observe()


def test_a_missing_servo_or_one_of_another_kind_is_named(servos, port, monkeypatch):
    Hasty(monkeypatch, port)
    arm = SO101(port.path, calibration=str(GOLDEN), timeout_ms=HASTY_MS)
    servos.silent = {3}
    with pytest.raises(UserError, match=r"servo 3 \(elbow_flex\) of the arm at .* is not there"):
        arm.connect()
    assert not arm.is_connected
    servos.silent = set()
    servos.put(6, 3, 1284, 2)
    with pytest.raises(UserError, match=r"servo 6 \(gripper\) .* of model 1284, not an STS3215"):
        arm_at(port)


def test_an_arm_of_another_calibration_is_not_read_nor_moved(port, tmp_path):
    other = json.loads(GOLDEN.read_text())
    other["elbow_flex"]["homing_offset"] = -811
    (tmp_path / "other.json").write_text(json.dumps(other))
    for path, words in (("other.json", "hold another calibration"), ("none.json", "there is no calibration")):
        arm = arm_at(port, tmp_path / path)
        assert not arm.is_calibrated
        port.requests.clear()
        for ask in (arm.observe, lambda arm=arm: arm.command(HERE)):
            with pytest.raises(UserError, match=words):
                ask()
        assert not port.requests
        arm.disconnect()


def test_a_person_calibrates_a_new_arm(port, servos, tmp_path):
    """The person's hand is the test: it moves the servos while the routine waits for Enter."""
    path, asked = tmp_path / "robots" / "new.json", []
    arm = arm_at(port, path)
    middles = {servo: 1500 + 100 * servo for servo in IDS}
    reach = {1: (800, 3300), 2: (900, 3200), 3: (1000, 3100), 4: (1100, 3000), 5: (2047, 2047), 6: (1500, 2600)}

    def ask(sentence: str) -> str:
        asked.append(sentence)
        if "middle" in sentence:
            assert all(servos.get(servo, 40) == 0 for servo in IDS), "the arm is limp"
            for servo in IDS:
                servos.place(servo, middles[servo])
        else:
            for side in (0, 1, 0):
                for servo in IDS:
                    servos.place(servo, reach[servo][side])
                seen = len(port.requests)
                wait_until(lambda seen=seen: len(port.requests) > seen + 2)
        return ""

    arm.calibrate(ask)
    assert ["middle" in sentence for sentence in asked] == [True, False]
    found = json.loads(path.read_text())
    for joint, servo in zip(JOINTS, IDS, strict=True):
        low, high = (0, 4095) if joint == "wrist_roll" else reach[servo]
        offset = middles[servo] - 2047
        wanted = {"id": servo, "drive_mode": 0, "homing_offset": offset, "range_min": low, "range_max": high}
        assert found[joint] == wanted
        assert servos.get(servo, 31, 2) == abs(offset) | (0x800 if offset < 0 else 0)
        assert (servos.get(servo, 9, 2), servos.get(servo, 11, 2)) == (low, high)
    assert arm.is_calibrated
    assert arm.observe().position[0] == pytest.approx(-1250 * TICK)
    arm.disconnect()


def test_joints_that_did_not_move_are_named_and_nothing_is_saved(port, tmp_path):
    arm = arm_at(port, tmp_path / "new.json")
    with pytest.raises(UserError, match="shoulder_pan, shoulder_lift, elbow_flex, wrist_flex, gripper did not move"):
        arm.calibrate(lambda sentence: "")
    assert not list(tmp_path.iterdir())
    arm.disconnect()


def test_a_calibration_that_is_there_is_written_to_the_servos(port, servos):
    for servo in IDS:
        servos.put(servo, 31, 0, 2)
    arm = arm_at(port)
    assert not arm.is_calibrated
    arm.calibrate(lambda sentence: "")
    assert arm.is_calibrated and servos.get(1, 31, 2) == 1345 | 0x800 and servos.get(2, 31, 2) == RANGES[2][0]
    arm.disconnect()
