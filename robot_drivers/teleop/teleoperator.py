"""What a teleoperator is: a device that a person moves or presses, read by a process of its own."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from robot_drivers.human import HumanInput


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
