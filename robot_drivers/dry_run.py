"""An arm that is measured and sent nothing, to see what would be commanded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from robot_drivers.driver import Measurement, RobotSpec, open_driver


class DryRun:
    """Another arm (``RobotDriver``) without its :meth:`command`; it prepares no scene and judges no episode either.

    The arm does what it does when it is connected and disconnected: no driver of ours moves it then.  It stays where it
    is (or limp), so a policy sees an arm that does not follow, and the supervisor keeps the commands within their lead
    of where it is.
    """

    def __init__(self, driver: str, options: Mapping[str, Any] | None = None) -> None:
        """``driver`` is "module:Class" of the arm, ``options`` are its own; raises as ``open_driver`` does."""
        self._driver = open_driver(driver, options or {})

    @property
    def spec(self) -> RobotSpec:
        return self._driver.spec

    @property
    def is_connected(self) -> bool:
        return self._driver.is_connected

    def connect(self) -> None:
        """Connect the arm; raises what its driver raises."""
        self._driver.connect()

    def observe(self) -> Measurement:
        """Measure the arm; raises what its driver raises."""
        return self._driver.observe()

    def command(self, position: np.ndarray) -> np.ndarray:
        """Send nothing, and return the target [D] that would have been sent."""
        return np.array(position, np.float64)

    def disconnect(self) -> None:
        """Disconnect the arm; safe to call twice."""
        self._driver.disconnect()
