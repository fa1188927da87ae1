"""Feetech's serial bus of STS and SMS servos: frames, registers, and a bus whose servos answer in time or not at all.

A frame is FF FF, the servo's id, a length (parameters + 2), an instruction or the servo's error status, parameters, and
a checksum: the complement of the sum of all bytes after FF FF.  Numbers are little-endian; a negative one is a
magnitude and a sign bit.  Sources: Feetech's communication protocol of serial servos, memory table of the STS3215.
"""

from __future__ import annotations

import itertools
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from robot_drivers.driver import DriverError
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import installed

BAUD = 1_000_000
MODEL = 777  # what an STS3215 calls itself
_HEADER, _EVERYBODY = b"\xff\xff", 0xFE
_READ, _WRITE, _SYNC_READ, _SYNC_WRITE = 0x02, 0x03, 0x82, 0x83
_AROUND = 6  # bytes of a frame besides its parameters
OVERLOAD = 0x20
_STATUS = {0x01: "voltage", 0x02: "angle sensor", 0x04: "temperature", 0x08: "current", OVERLOAD: "overload"}


@dataclass(frozen=True)
class Register:
    """A number in a servo's memory: where it is, its bytes, and the bit that means minus (None: never negative).

    Names are LeRobot's, which follow the memory table.
    """

    name: str
    address: int
    size: int = 1
    sign: int | None = None

    def encode(self, value: int) -> bytes:
        """``value`` as the servo stores it; raises DriverError when it does not fit."""
        bits = 8 * self.size if self.sign is None else self.sign
        if abs(value) >= 1 << bits or (value < 0 and self.sign is None):
            raise DriverError(f"{value} does not fit into {self.name}, so it was not written; it has {bits} bits.")
        minus = 1 << self.sign if self.sign is not None and value < 0 else 0
        return (abs(value) | minus).to_bytes(self.size, "little")

    def decode(self, data: bytes) -> int:
        """The number that ``encode`` made ``data`` of."""
        value = int.from_bytes(data, "little")
        if self.sign is None:
            return value
        magnitude = value & ((1 << self.sign) - 1)
        return -magnitude if value >> self.sign & 1 else magnitude


MODEL_NUMBER = Register("Model_Number", 3, 2)
RETURN_DELAY_TIME = Register("Return_Delay_Time", 7)  # 2 µs
MIN_POSITION_LIMIT = Register("Min_Position_Limit", 9, 2)
MAX_POSITION_LIMIT = Register("Max_Position_Limit", 11, 2)
MAX_TORQUE_LIMIT = Register("Max_Torque_Limit", 16, 2)  # 0.1 %
PHASE = Register("Phase", 18)  # bit 2: speeds are in ticks/s instead of 50 ticks/s
P_COEFFICIENT = Register("P_Coefficient", 21)
D_COEFFICIENT = Register("D_Coefficient", 22)
I_COEFFICIENT = Register("I_Coefficient", 23)
PROTECTION_CURRENT = Register("Protection_Current", 28, 2)  # 6.5 mA
HOMING_OFFSET = Register("Homing_Offset", 31, 2, sign=11)
OPERATING_MODE = Register("Operating_Mode", 33)  # 0: position
OVERLOAD_TORQUE = Register("Overload_Torque", 36)  # % of the load that counts as overload
TORQUE_ENABLE = Register("Torque_Enable", 40)
ACCELERATION = Register("Acceleration", 41)  # 100 ticks/s²
GOAL_POSITION = Register("Goal_Position", 42, 2, sign=15)
LOCK = Register("Lock", 55)  # 1: what is written to the permanent memory is lost without power
PRESENT_POSITION = Register("Present_Position", 56, 2, sign=15)
PRESENT_VELOCITY = Register("Present_Velocity", 58, 2, sign=15)
MAXIMUM_ACCELERATION = Register("Maximum_Acceleration", 85)  # 100 ticks/s²


class StatusError(DriverError):
    """A servo did what it was asked and reports that something is wrong with it."""

    def __init__(self, servo: int, status: int) -> None:
        names = [name for bit, name in _STATUS.items() if status & bit] or [f"status {status:#04x}"]
        super().__init__(
            f"servo {servo} reports {' and '.join(names)}, so it cannot be relied on; relieve it, let it cool, check "
            "its supply, and switch its power off and on."
        )


@dataclass(frozen=True)
class Answer:
    """What one servo said: the numbers that it was asked for, and its error status (0: none)."""

    values: tuple[int, ...]
    status: int


class Bus:
    """Servos on one serial port, which belongs to this program alone while it is open.

    A request waits ``timeout`` seconds for its answer and is repeated ``retries`` times when the answer is missing or
    wrong; then DriverError names the servo, what it was asked, and what came.  Serial adapters that collect bytes for
    longer (an FTDI's latency timer is 16 ms) need a longer ``timeout``.
    """

    def __init__(self, port: str, timeout: float = 0.01, retries: int = 2) -> None:
        self.port, self._timeout, self._retries = port, timeout, retries
        self._serial: Any = None

    @property
    def is_open(self) -> bool:
        return self._serial is not None

    def open(self) -> None:
        """Take the port; raises UserError with the cure."""
        serial = installed("serial", "no servo can be reached", "robot", "pyserial")
        try:
            self._serial = serial.Serial(
                self.port, BAUD, timeout=self._timeout, write_timeout=self._timeout, exclusive=True
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"the port {self.port!r} cannot be opened ({error}), so the servos are not reached; look at the cable, "
                "at who else uses the port, and at your right to use it (Linux: the group dialout)."
            ) from error

    def close(self) -> None:
        """Give the port back; safe to call twice."""
        if self._serial is not None:
            self._serial.close()
            self._serial = None

    def read(self, servo: int, register: Register) -> int:
        """The number in ``register`` of ``servo``; raises DriverError, StatusError for a servo in trouble."""
        request = frame(servo, _READ, bytes([register.address, register.size]))
        return self._sound(servo, request, (register,), register.name).values[0]

    def write(self, servo: int, register: Register, value: int) -> None:
        """Write ``value`` and wait for the acknowledgement; raises as :meth:`read`."""
        request = frame(servo, _WRITE, bytes([register.address]) + register.encode(value))
        self._sound(servo, request, (), f"{register.name} = {value}")

    def sync_read(self, servos: Sequence[int], registers: Sequence[Register]) -> list[Answer]:
        """What all ``servos`` hold in ``registers``, which follow each other in memory, by one request.

        Raises DriverError when one of them does not answer properly; a status is left to the caller.
        """
        for first, second in itertools.pairwise(registers):
            if first.address + first.size != second.address:
                raise DriverError(f"{second.name} does not follow {first.name}, so they are not read by one request.")
        size = sum(register.size for register in registers)
        request = frame(_EVERYBODY, _SYNC_READ, bytes([registers[0].address, size, *servos]))
        return self._ask(request, servos, registers, " and ".join(register.name for register in registers))

    def sync_write(self, register: Register, values: Mapping[int, int]) -> None:
        """Write {servo: value} by one request, which no servo acknowledges."""
        data = b"".join(bytes([servo]) + register.encode(value) for servo, value in values.items())
        self._send(frame(_EVERYBODY, _SYNC_WRITE, bytes([register.address, register.size]) + data))

    def _ask(self, request: bytes, servos: Sequence[int], registers: Sequence[Register], what: str) -> list[Answer]:
        """The answers of ``servos`` in their order, who were asked for ``what``."""
        size = sum(register.size for register in registers)
        reason = ""
        for _ in range(1 + self._retries):
            self._send(request)
            try:
                return parse(self._receive(len(servos) * (size + _AROUND)), servos, registers)
            except DriverError as error:
                reason = str(error)
        raise DriverError(
            f"{self.port!r} was asked for {what} {1 + self._retries} times, but {reason}; look at the cables between "
            "the servos, at their ids and at their supply."
        )

    def _send(self, request: bytes) -> None:
        if self._serial is None:
            raise DriverError(f"the port {self.port!r} is not open, so nothing was sent; connect first.")
        with self._there():
            self._serial.reset_input_buffer()  # what came too late for an earlier request
            self._serial.write(request)

    def _receive(self, size: int) -> bytes:
        with self._there():
            return bytes(self._serial.read(size))

    @contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except (OSError, termios.error) as error:
            raise DriverError(
                f"the port {self.port!r} is lost ({error}), so the servos are not reached; plug it in again."
            ) from error

    def _sound(self, servo: int, request: bytes, registers: Sequence[Register], what: str) -> Answer:
        (answer,) = self._ask(request, [servo], registers, what)
        if answer.status:
            raise StatusError(servo, answer.status)
        return answer


def frame(servo: int, instruction: int, parameters: bytes = b"") -> bytes:
    """The bytes of one request."""
    body = bytes([servo, len(parameters) + 2, instruction]) + parameters
    return _HEADER + body + bytes([checksum(body)])


def checksum(body: bytes) -> int:
    """The last byte of a frame whose bytes after FF FF are ``body``."""
    return ~sum(body) & 0xFF


def parse(data: bytes, servos: Sequence[int], registers: Sequence[Register]) -> list[Answer]:
    """What every one of ``servos`` says of ``registers`` in ``data``, their frames in this order.

    Raises DriverError, which says what is wrong, for anything else.
    """
    size = sum(register.size for register in registers)
    found, length = [], size + _AROUND
    for at, servo in enumerate(servos):
        part = data[at * length : (at + 1) * length]
        if not part:
            raise DriverError(f"servo {servo} did not answer")
        if part[:2] != _HEADER[: len(part)]:
            raise DriverError(f"servo {servo}'s answer begins with {part[:2].hex(' ')} instead of ff ff")
        if len(part) > 2 and part[2] != servo:
            raise DriverError(f"servo {part[2]} answered in place of servo {servo}")
        if len(part) > 3 and part[3] != size + 2:
            raise DriverError(f"servo {servo}'s answer has length {part[3]} instead of {size + 2}")
        if len(part) < length:
            raise DriverError(f"servo {servo}'s answer ended after {len(part)} of {length} bytes")
        if part[-1] != checksum(part[2:-1]):
            raise DriverError(f"servo {servo}'s answer {part.hex(' ')} has a wrong checksum")
        ends = list(itertools.accumulate((register.size for register in registers), initial=5))
        values = (
            register.decode(part[start:end]) for register, start, end in zip(registers, ends, ends[1:], strict=False)
        )
        found.append(Answer(tuple(values), part[4]))
    return found
