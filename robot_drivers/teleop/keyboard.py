"""The keys of a terminal as a teleoperator.

{"name": "robot_drivers.teleop.keyboard:Keyboard", "options": {"joints": 6, "speed": 0.4}}

A teleoperator's process is in the background of the terminal, where reading is forbidden.  It takes the foreground
meanwhile; a small process beside it gives everything back when the teleoperator ends, however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from robot_drivers.record import HumanInput
from vla_rl.contract.errors import UserError

INTERRUPT = "\x03"  # Ctrl-C


class Terminal:
    """The keyboard behind ``path``, "/dev/tty" for the terminal that the program was started in."""

    def __init__(self, path: str = "/dev/tty") -> None:
        self._path = path
        self._end = -1
        self._owner = 0
        self._restorer: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Take the keys; raises UserError where there is no terminal."""
        try:
            self._end = os.open(self._path, os.O_RDWR | os.O_NOCTTY)
            settings = termios.tcgetattr(self._end)
        except (OSError, termios.error) as error:
            raise UserError(
                f"{self._path!r} is no terminal here ({error}), so no key can be read; start from a terminal, or "
                "choose another teleoperator."
            ) from error
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # changing a terminal from the background would stop us
        with suppress(OSError):  # not the terminal that this program was started in: nobody to give it back to
            self._owner = os.tcgetpgrp(self._end)
        self._restorer = _start_restorer(self._end, self._owner)
        if self._owner:
            os.tcsetpgrp(self._end, os.getpgrp())
        settings[0] &= ~termios.IXON
        # TOSTOP would stop the program that writes behind us.
        settings[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN | termios.TOSTOP)
        settings[6][termios.VMIN] = settings[6][termios.VTIME] = 0  # a read that finds nothing returns
        termios.tcsetattr(self._end, termios.TCSANOW, settings)

    def read(self) -> str:
        """What was typed since the last call; Ctrl-C interrupts the program that had the terminal, as ever."""
        typed = os.read(self._end, 256).decode(errors="replace")
        if INTERRUPT in typed and self._owner:
            with suppress(ProcessLookupError):  # it has ended already
                os.killpg(self._owner, signal.SIGINT)
        return typed

    def close(self) -> None:
        if self._restorer is not None:
            self._restorer.communicate()
            self._restorer = None
        if self._end >= 0:
            os.close(self._end)
            self._end = -1


class Foreground:
    """The program's place in front of its terminal, which a teleoperator takes meanwhile."""

    def __init__(self, path: str = "/dev/tty") -> None:
        self._path = path
        self._held = self._holds()

    def wait(self, patience: float = 5.0) -> None:
        """Until the terminal is given back, settings included, or ``patience`` seconds have passed."""
        end = time.monotonic() + patience
        while self._held and not self._holds() and time.monotonic() < end:
            time.sleep(0.005)

    def _holds(self) -> bool:
        try:
            terminal = os.open(self._path, os.O_RDONLY | os.O_NOCTTY)
        except OSError:  # no terminal
            return False
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        except OSError:  # somebody else's
            return False
        finally:
            os.close(terminal)


def _start_restorer(end: int, owner: int) -> subprocess.Popen[bytes]:
    """A process that restores the terminal ``end`` when this one ends or closes the pipe."""
    restorer = subprocess.Popen(
        [sys.executable, "-m", "robot_drivers.teleop.keyboard", str(end), str(owner)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(end,),
        process_group=0,
    )
    assert restorer.stdout is not None
    if not restorer.stdout.read(1):
        raise UserError("the terminal's settings cannot be kept, so it is not used; see the message above.")
    return restorer


def restore(end: int, owner: int) -> None:
    """Wait until standard input ends, then set the terminal ``end`` as it was at first, with ``owner`` in front.

    Keys that nobody has read are thrown away: they were not meant for a shell.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    settings = termios.tcgetattr(end)
    os.write(1, b"!")
    sys.stdin.buffer.read()
    termios.tcsetattr(end, termios.TCSAFLUSH, settings)
    if owner:
        with suppress(OSError):  # it has ended
            os.tcsetpgrp(end, owner)


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


if __name__ == "__main__":
    restore(int(sys.argv[1]), int(sys.argv[2]))
