"""``python -m robot_drivers.teleop.process``: reads one teleoperator at a rate and sends what it says to control.

A process of its own, so that a device which hangs stops nobody.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from typing import Protocol, runtime_checkable

from robot_drivers.control import Rate
from robot_drivers.driver import DriverError, opened
from robot_drivers.record import HumanInput
from vla_rl.contract.child import take_pipes
from vla_rl.contract.errors import UserError
from vla_rl.contract.wire import handshake, read_message, write_message

_HZ = 100.0


@runtime_checkable
class Teleoperator(Protocol):
    """A leader arm, a keyboard, a gamepad, a SpaceMouse.

    It may block: it is read in a process of its own, and a person whose device is silent is taken to hold still.
    """

    def connect(self) -> None:
        """Open the device; raises UserError with the cure when it cannot be reached."""

    def read(self) -> HumanInput:
        """What the person does now; waits for no event."""

    def disconnect(self) -> None:
        """Free the device; safe to call twice."""


def open_teleoperator(name: str, options: dict[str, object]) -> Teleoperator:
    """The teleoperator that ``name`` ("module:Class") makes of ``options``, not yet connected."""
    return opened(name, options, Teleoperator, "nobody could take over")  # type: ignore[type-abstract]


def main() -> None:
    """Read until control is gone; a device that cannot be read ends it, and control is told why."""
    reader, writer = take_pipes()
    handshake(reader, writer, "teleoperator")
    start = read_message(reader)
    try:
        device = open_teleoperator(start["teleoperator"], start["options"])
        device.connect()
        rate = Rate(1 / _HZ)
        with contextlib.suppress(BrokenPipeError), contextlib.ExitStack() as connected:  # until control is gone
            connected.callback(device.disconnect)
            while True:
                rate.wait()
                write_message(writer, asdict(device.read()))
    except (UserError, DriverError) as error:
        write_message(writer, {"failed": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
