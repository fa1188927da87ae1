"""The keys of a terminal as a teleoperator.

{"name": "robot_drivers.teleop.keyboard:Keyboard", "options": {"joints": 6, "speed": 0.4}}
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from robot_drivers.human import HumanInput
from robot_drivers.teleop.terminal import INTERRUPT, Terminal
from vla_rl.contract.errors import UserError

_FORWARD, _BACKWARD = "1234567", "zxcvbnm"  # a joint's keys are above each other
_EVENTS = {"s": "success", "f": "failure", "r": "redo", "a": "rearm", "\n": "ready", "\r": "ready", INTERRUPT: "stop"}
_ESCAPE = "\x1b"
HELP = (
    "space takes over and hands back; Enter begins an episode; s, f and r end it: success, failure, redo; Esc stops "
    "the arm, a arms it again"
)


class Switches:
    """The keys that do not move: whether the person holds control, and what else was pressed."""

    def __init__(self) -> None:
        self.engaged = False

    def press(self, typed: str) -> tuple[str, ...]:
        """The events in ``typed``.  Escape stops, and what follows it is the rest of a special key's name."""
        before, escape, _ = typed.partition(_ESCAPE)
        self.engaged ^= before.count(" ") % 2 == 1
        events = [_EVENTS[key] for key in before if key in _EVENTS]
        return (*events, *(["stop"] if escape else []))


class Keyboard:
    """Keys 1 to 7 move the joints forward, z to m below them backward; see ``HELP`` for the others.

    joints    how many the arm has
    speed     of a joint while its key is held, in its unit per second, or one for every joint
    pulse     seconds that one press counts; more than the time between two repetitions of a held key
    terminal  which keyboard

    The person has no enabling switch: a terminal does not say when a key is released.
    """

    def __init__(
        self, joints: int = 6, speed: float | Sequence[float] = 0.4, pulse: float = 0.15, terminal: str = "/dev/tty"
    ) -> None:
        if not 0 < joints <= len(_FORWARD):
            raise UserError(
                f"joints={joints}, but the keyboard moves 1 to {len(_FORWARD)}; choose another teleoperator."
            )
        speeds = np.asarray(speed, np.float64)
        if speeds.shape not in ((), (joints,)):
            raise UserError(f"speed has {speeds.size} entries for {joints} joints; give one, or one for each.")
        self._speed = np.broadcast_to(speeds, (joints,))
        self._moving, self._until = np.zeros(joints), np.zeros(joints)
        self._pulse, self._terminal, self._switches = pulse, Terminal(terminal), Switches()

    def connect(self) -> None:
        self._terminal.open()
        joints = len(self._speed)
        print(f"{_FORWARD[:joints]} and {_BACKWARD[:joints]} move the joints; {HELP}", file=sys.stderr)

    def read(self) -> HumanInput:
        """The velocity that the keys ask for."""
        typed, now = self._terminal.read(), time.monotonic()
        for keys, direction in ((_FORWARD, 1.0), (_BACKWARD, -1.0)):
            for joint, key in enumerate(keys[: len(self._speed)]):
                if key in typed.partition(_ESCAPE)[0]:
                    self._moving[joint], self._until[joint] = direction, now + self._pulse
        events = self._switches.press(typed)
        velocity = np.where(now < self._until, self._moving * self._speed, 0.0)
        return HumanInput(now, self._switches.engaged, velocity=velocity, keys=events)

    def disconnect(self) -> None:
        self._terminal.close()
