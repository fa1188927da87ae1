"""A person takes control of the arm and hands it back, without a jump."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_SHRINK = 0.5  # of what the leader moves


@dataclass(frozen=True)
class HumanInput:
    """What a teleoperator reads at one moment.

    captured   seconds of ``time.monotonic`` when it was read
    engaged    whether the person holds control
    position   float64 [D]  of a leader arm, in the joints' units; None for devices that steer
    velocity   float64 [D]  per second, of devices that steer (keyboard, gamepad); None for a leader
    keys       what was pressed since the last input: "success", "failure", "redo", "stop", "rearm",
               "ready" (for the next episode)
    deadman_at when the enabling switch was last seen pressed; None if there is none or it never was
    """

    captured: float
    engaged: bool = False
    position: np.ndarray | None = None
    velocity: np.ndarray | None = None
    keys: tuple[str, ...] = ()
    deadman_at: float | None = None


class TakeOver:
    """Turns a teleoperator's input into requests that continue what the arm does.

    A leader arm seldom stands where the robot does when the person takes over.  Its offset is measured at that moment
    and kept, so the first request is the last command; the offset of a joint then shrinks by half of what the leader
    moves it, so the arm never moves while the person's hand rests, and both agree after a while.  A device that steers
    continues from the last command, which the supervisor has clipped: it never runs ahead of the arm.
    """

    def __init__(self) -> None:
        self.interventions = 0  # so far
        self._offset: np.ndarray | None = None
        self._leader: np.ndarray | None = None

    def anchor(self) -> None:
        """The next request is the last command, wherever the leader is."""
        self._offset = self._leader = None

    def request(self, read: HumanInput, last: np.ndarray, dt: float) -> np.ndarray | None:
        """The position [D] that the person asks for after the command ``last`` [D]; None for no position at all."""
        if read.position is None:
            return None if read.velocity is None else last + read.velocity * dt
        if self._offset is None or self._leader is None:
            self._offset, self._leader = last - read.position, read.position.copy()
        moved = np.abs(read.position - self._leader)
        self._leader = read.position.copy()  # a device may write into its own again
        self._offset = np.sign(self._offset) * np.maximum(np.abs(self._offset) - _SHRINK * moved, 0.0)
        wanted: np.ndarray = read.position + self._offset
        return wanted
