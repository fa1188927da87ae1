"""A terminal whose keys arrive one by one, in a process that does not own it.

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
from contextlib import suppress

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
        """Give the terminal back as it was; safe to call twice."""
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
        [sys.executable, "-m", "robot_drivers.teleop.terminal", str(end), str(owner)],
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


if __name__ == "__main__":
    restore(int(sys.argv[1]), int(sys.argv[2]))
