"""The SO-101's driver with servos behind a pseudo-terminal."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from robot_drivers import feetech
from robot_drivers.driver import Calibrates, DriverError, open_driver
from robot_drivers.feetech import StatusError
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
    assert arm.spec.position.unit == "rad, rad, rad, rad, rad, 1" and arm.spec.velocity_measured
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
