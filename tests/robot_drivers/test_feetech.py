"""Frames and the bus of Feetech servos, byte by byte, through a real pseudo-terminal."""

from __future__ import annotations

import pytest

from robot_drivers import feetech
from robot_drivers.driver import DriverError
from robot_drivers.feetech import Bus, Register, StatusError
from tests.robot_drivers.servo_bus import Hasty, Port, Servos, sealed
from vla_rl.contract.errors import UserError

PATIENT, HASTY = 60.0, 0.1  # seconds for an answer that comes, and for one that does not

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

    def open_bus(path: str, timeout: float = PATIENT, retries: int = 2) -> Bus:
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
        bus = bus_at(port.path, HASTY if reason.endswith(("bytes", "answer")) else PATIENT)
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
        bus = bus_at(port.path, HASTY, retries=0)
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
