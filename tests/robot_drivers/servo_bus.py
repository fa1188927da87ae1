"""Servos behind a real pseudo-terminal: a thread that answers what a program sends to the port, well or badly."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping

import pytest

from robot_drivers.feetech import Bus
from tests.patience import wait_until

TICKS = {1: 2100, 2: 1200, 3: 2900, 4: 2054, 5: 2047, 6: 2400}
# What the servos of TICKS hold: Homing_Offset, Min_Position_Limit, Max_Position_Limit, as in golden/so101.json.
RANGES = {
    1: (-1345, 741, 3484),
    2: (1023, 837, 3227),
    3: (-812, 859, 3081),
    4: (204, 878, 3230),
    5: (-1, 0, 4095),
    6: (1478, 2034, 3499),
}


class Port:
    """One end is ``path``, which a driver opens; at the other, ``answer(request)`` is sent for every request."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._ours, self._theirs = os.openpty()
        self.path, self.requests = os.ttyname(self._theirs), list[bytes]()
        self.answered = 0  # requests, also where the answer is nothing
        self._answer, self._closing = answer, os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._closing[1], b"x")
        self._thread.join()
        for end in (self._ours, self._theirs, *self._closing):
            os.close(end)

    def _run(self) -> None:
        waiting = b""
        while self._closing[0] not in select.select([self._ours, self._closing[0]], [], [])[0]:
            waiting += os.read(self._ours, 4096)
            while len(waiting) >= 4 and len(waiting) >= 4 + waiting[3]:
                request, waiting = waiting[: 4 + waiting[3]], waiting[4 + waiting[3] :]
                self.requests.append(request)
                os.write(self._ours, self._answer(request))
                self.answered += 1


class Hasty:
    """Requests of ``Bus`` wait for their answers only from when the servos at ``port`` have said what they say.

    A short timeout is enough then, also where this process or a thread of it is held up.
    """

    def __init__(self, patch: pytest.MonkeyPatch, port: Port) -> None:
        send, receive, sent = Bus._send, Bus._receive, [0]

        def counted(bus: Bus, request: bytes) -> None:
            sent[0] += 1
            send(bus, request)

        def late(bus: Bus, size: int) -> bytes:
            wait_until(lambda: port.answered == sent[0])
            return receive(bus, size)

        patch.setattr(Bus, "_send", counted)
        patch.setattr(Bus, "_receive", late)


def sealed(*body: int) -> bytes:
    """FF FF, ``body`` and its checksum."""
    return bytes([0xFF, 0xFF, *body, 0xFF - sum(body) % 256])


class Servos:
    """Six servos with the memory that the protocol's documents describe; ``spoil`` changes what they say."""

    def __init__(self, ranges: Mapping[int, tuple[int, int, int]] = RANGES) -> None:
        self.memory = {servo: bytearray(128) for servo in TICKS}
        self.status, self.silent = dict.fromkeys(TICKS, 0), set[int]()
        self.spoil: Callable[[bytes], bytes] = lambda answer: answer
        for servo in TICKS:
            self.put(servo, 3, 777, 2)
            self.put(servo, 18, 12)
            self.place(servo, TICKS[servo])
            for address, value in zip((31, 9, 11), ranges[servo], strict=True):
                self.put(servo, address, abs(value) | (0x800 if value < 0 else 0), 2)

    def put(self, servo: int, address: int, value: int, size: int = 1) -> None:
        self.memory[servo][address : address + size] = value.to_bytes(size, "little")

    def get(self, servo: int, address: int, size: int = 1) -> int:
        return int.from_bytes(self.memory[servo][address : address + size], "little")

    def place(self, servo: int, ticks: int, speed: int = 0) -> None:
        """Let ``servo`` be at ``ticks`` and move at ``speed`` ticks/s."""
        self.put(servo, 56, ticks, 2)
        self.put(servo, 58, abs(speed) | (0x8000 if speed < 0 else 0), 2)

    def answer(self, request: bytes) -> bytes:
        assert request == sealed(*request[2:-1]), "a servo ignores what is broken"
        servo, instruction, data = request[2], request[4], request[5:-1]
        if instruction == 0x82:
            return self.spoil(b"".join(self._say(one, self._held(one, *data[:2])) for one in data[2:]))
        if instruction == 0x83:
            address, size = data[:2]
            for at in range(2, len(data), size + 1):
                self._store(data[at], address, data[at + 1 : at + 1 + size])
            return b""
        if servo not in self.memory:
            return b""
        if instruction == 0x03:
            self._store(servo, data[0], data[1:])
        return self.spoil(self._say(servo, self._held(servo, *data) if instruction == 0x02 else b""))

    def _store(self, servo: int, address: int, data: bytes) -> None:
        if servo in self.memory:
            self.memory[servo][address : address + len(data)] = data

    def _held(self, servo: int, address: int, size: int) -> bytes:
        return bytes(self.memory[servo][address : address + size]) if servo in self.memory else b""

    def _say(self, servo: int, data: bytes) -> bytes:
        if servo in self.silent or servo not in self.memory:
            return b""
        return sealed(servo, len(data) + 2, self.status[servo], *data)
