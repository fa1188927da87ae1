"""Gamepads and SpaceMice as Linux's joystick events; no library is needed.

    {"name": "robot_drivers.teleop.gamepad:Gamepad", "options": {"device": "/dev/input/js0"}}
    {"name": "robot_drivers.teleop.gamepad:SpaceMouse", "options": {"device": "/dev/input/js0"}}

An event has 8 bytes: milliseconds (u32), value (s16), type (u8: 1 button, 2 axis, with 0x80 for the state at the
beginning), number (u8).  Source: the Linux kernel's Documentation/input/joydev/joystick-api.rst.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence

import numpy as np

from robot_drivers.driver import DriverError
from robot_drivers.record import HumanInput
from vla_rl.contract.errors import UserError

_EVENT = struct.Struct("<IhBB")
_BUTTON, _AXIS, _INITIAL = 0x01, 0x02, 0x80
_FULL = 32767.0
EVENTS = ("success", "failure", "redo", "stop", "rearm", "ready")
# An Xbox pad as Linux's xpad driver counts it: sticks are axes 0, 1 and 3, 4, the cross is 6, 7.
_PAD_AXES = ((0, -0.6), (1, -0.6), (4, 0.6), (7, 0.6), (3, 0.8), (6, 0.6))
_PAD_BUTTONS = {"success": 0, "stop": 1, "redo": 2, "failure": 3, "ready": 6, "rearm": 7}  # A, B, X, Y, Back, Start
_MOUSE_AXES = ((0, -0.6), (1, 0.6), (2, 0.6), (3, 0.6), (5, 0.8), (4, 0.6))
_MOUSE_BUTTONS = {"success": 0, "stop": 1}


class Gamepad:
    """Sticks move joints while a button is held.

    device   the joystick
    axes     for every joint, the number of an axis and the joint's velocity when it is pushed to its end, in the
             joint's unit per second
    buttons  {"success", "failure", "redo", "stop", "rearm", "ready": number of a button}
    enable   the button that gives the person control while it is held, an enabling switch; None: whoever pushes an axis
             has control
    dead     of an axis' range at its middle, where it counts as untouched
    """

    def __init__(
        self,
        device: str = "/dev/input/js0",
        axes: Sequence[tuple[int, float]] = _PAD_AXES,
        buttons: Mapping[str, int] = _PAD_BUTTONS,
        enable: int | None = 4,
        dead: float = 0.1,
    ) -> None:
        unknown = sorted(set(buttons) - set(EVENTS))
        if unknown:
            raise UserError(f"buttons have {', '.join(unknown)}, which means nothing; known: {', '.join(EVENTS)}.")
        if not 0 <= dead < 1:
            raise UserError(f"dead={dead} leaves no range to push an axis to, so nothing would move; give 0 to 1.")
        self._device, self._dead, self._enable = device, dead, enable
        self._axes = [int(axis) for axis, _ in axes]
        self._speed = np.array([float(speed) for _, speed in axes])
        self._events = {int(number): event for event, number in buttons.items()}
        self._pushed: dict[int, float] = {}
        self._held: set[int] = set()
        self._deadman_at: float | None = None
        self._end, self._rest = -1, b""

    def connect(self) -> None:
        try:
            self._end = os.open(self._device, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(
                f"the joystick {self._device!r} cannot be opened ({error}), so nobody can take over; plug it in, or "
                "name another under /dev/input (js*)."
            ) from error
        self._pushed, self._held, self._rest = {}, set(), b""

    def read(self) -> HumanInput:
        """The velocity that the sticks ask for; raises DriverError when the device is gone."""
        keys = tuple(event for event in map(self._take, self._new()) if event)
        now = time.monotonic()
        pushed = np.array([self._pushed.get(axis, 0.0) for axis in self._axes])
        touched = np.abs(pushed) > self._dead
        beyond = np.sign(pushed) * (np.abs(pushed) - self._dead) / (1 - self._dead)
        engaged = bool(touched.any()) if self._enable is None else self._enable in self._held
        if self._enable is not None and engaged:
            self._deadman_at = now
        return HumanInput(
            now, engaged, velocity=np.where(touched, beyond, 0.0) * self._speed, keys=keys, deadman_at=self._deadman_at
        )

    def disconnect(self) -> None:
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def _new(self) -> list[tuple[int, int, int]]:
        """(value, type, number) of the events since the last call."""
        try:
            while piece := os.read(self._end, 64 * _EVENT.size):
                self._rest += piece
        except BlockingIOError:
            pass
        except OSError as error:
            raise DriverError(
                f"the joystick {self._device!r} is gone ({error}); plug it in and begin again."
            ) from error
        whole = len(self._rest) // _EVENT.size * _EVENT.size
        data, self._rest = self._rest[:whole], self._rest[whole:]
        return [event[1:] for event in _EVENT.iter_unpack(data)]

    def _take(self, event: tuple[int, int, int]) -> str:
        """Remember ``event``; returns what it means if it is a button that was pressed now."""
        value, kind, number = event
        if kind & ~_INITIAL == _AXIS:
            self._pushed[number] = value / _FULL
        elif kind & ~_INITIAL == _BUTTON:
            (self._held.add if value else self._held.discard)(number)
            if value and not kind & _INITIAL:
                return self._events.get(number, "")
        return ""


class SpaceMouse(Gamepad):
    """A 3Dconnexion SpaceMouse: whoever pushes its cap has control, as in HIL-SERL; options as of :class:`Gamepad`."""

    def __init__(
        self,
        device: str = "/dev/input/js0",
        axes: Sequence[tuple[int, float]] = _MOUSE_AXES,
        buttons: Mapping[str, int] = _MOUSE_BUTTONS,
        dead: float = 0.05,
    ) -> None:
        super().__init__(device, axes, buttons, enable=None, dead=dead)
