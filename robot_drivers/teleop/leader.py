"""The leader arm of an SO-101: a person moves it, the follower does the same.

{"name": "robot_drivers.teleop.leader:SO101Leader", "options": {"port": "/dev/ttyACM1", "id": "my_leader"}}
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from robot_drivers.driver import Asks, DriverError
from robot_drivers.record import HumanInput
from robot_drivers.so101 import Servos, default_path
from robot_drivers.teleop.keyboard import HELP, Switches, Terminal

_FOLDERS = ("teleoperators/so101_leader", "teleoperators/so_leader")  # LeRobot's until 0.4.3, and since


class SO101Leader:
    """Its servos are limp.  The terminal's keys say whether the follower follows, and how the episode ended.

    port         its serial port
    id           LeRobot's name of it, which chooses the calibration file
    calibration  another path of that file
    terminal     whose keys count (``keyboard.HELP``); "" for none: then the follower always follows
    timeout_ms   time that the servos have for an answer

    A moment without an answer is a moment without a request, and the follower comes to rest if it lasts.
    """

    def __init__(
        self,
        port: str,
        id: str = "so101",
        calibration: str = "",
        terminal: str = "/dev/tty",
        timeout_ms: float = 10.0,
    ) -> None:
        path = Path(calibration).expanduser() if calibration else default_path(_FOLDERS, id)
        self._servos = Servos(port, path, timeout_ms)
        self._terminal, self._switches = Terminal(terminal) if terminal else None, Switches()
        self._lost = ""

    @property
    def is_calibrated(self) -> bool:
        """Whether the servos hold the calibration of the file; known after :meth:`connect`."""
        return self._servos.is_calibrated

    def connect(self) -> None:
        """Find the servos and let them go limp."""
        self._servos.open()
        try:
            self._servos.release()
            self._servos.configure({})
            if self._terminal is not None:
                self._terminal.open()
                print(HELP, file=sys.stderr)
        except Exception:
            self._servos.bus.close()
            raise

    def read(self) -> HumanInput:
        """Where the leader is; raises UserError for one that is not calibrated."""
        keys = self._switches.press(self._terminal.read()) if self._terminal is not None else ()
        engaged, scale = self._terminal is None or self._switches.engaged, self._servos.scale
        asked = time.monotonic()
        try:
            ticks = self._servos.read()[0]
        except DriverError as error:
            if str(error) != self._lost:
                print(error, file=sys.stderr)
            self._lost = str(error)
            return HumanInput(asked, engaged, keys=keys)
        self._lost = ""
        return HumanInput((asked + time.monotonic()) / 2, engaged, scale.position(ticks), keys=keys)

    def calibrate(self, ask: Asks) -> None:
        """LeRobot's routine, by hand."""
        self._servos.calibrate(ask)

    def disconnect(self) -> None:
        if self._terminal is not None:
            self._terminal.close()
        self._servos.bus.close()
