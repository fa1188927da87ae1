"""The simulated robot: an environment that is commanded by joint positions, behind ``RobotDriver``, in lock-step.

Every command advances the simulation (``simulated_hardware.py``) by one control step, in virtual time, so that an
episode is the same bit for bit.  In real time it is a process of its own (``simulated_process.py``)::

    python -m robot_drivers.simulated robot.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from robot_drivers.driver import DriverError, Measurement, RobotSpec
from robot_drivers.simulated_hardware import SO101, Hardware, Imperfections, Simulated, env_spec_of, robot_spec
from vla_rl.contract.env import Observation
from vla_rl.contract.spec import EnvSpec


class SimulatedRobot:
    """An environment in lock-step as a robot (``RobotDriver``, ``Resets``, ``Judged``)."""

    def __init__(
        self,
        env: str = SO101,
        options: Mapping[str, Any] | None = None,
        imperfections: Mapping[str, Any] | None = None,
        clock: Callable[[], float] | None = None,
        **motors: float,
    ) -> None:
        """``env`` and its ``options``, and ``motors``: see ``Simulated``; ``imperfections``: see ``Imperfections``.

        ``clock`` tells the virtual time in seconds; without one it is the number of commands, in control steps.
        Raises ContractError for an environment that is not commanded by joint positions.
        """
        self._simulated = Simulated(env, options or {}, **motors)
        self._imperfections = Imperfections(**_tuples(imperfections or {}))
        self.env_spec: EnvSpec = env_spec_of(self._simulated)
        self._spec = robot_spec(self._simulated, self.env_spec)
        self._hardware: Hardware | None = None
        self._steps = 0
        self._clock = clock or (lambda: self._steps * self.env_spec.control_dt)

    @property
    def spec(self) -> RobotSpec:
        return self._spec

    @property
    def is_connected(self) -> bool:
        return self._hardware is not None

    def connect(self) -> None:
        """Build the environment and start the episode of seed 0."""
        if self._hardware is None:
            self._hardware = Hardware(self._simulated, self._imperfections)
            self.reset(0)

    def reset(self, seed: int) -> None:
        """Start the episode of ``seed``; time goes on."""
        self._connected.reset(seed, self._clock())

    @property
    def outcome(self) -> str:
        """The cause of the episode's end, "" while it runs."""
        return self._connected.outcome

    def observe(self) -> Measurement:
        """The newest measurement that has arrived by now; raises DriverError where it is lost."""
        position, captured = self._connected.measured(self._clock())
        return Measurement(position, None, captured)

    def command(self, position: np.ndarray) -> np.ndarray:
        """Send a target [D] and advance the simulation by one control step; returns the target within the limits."""
        now = self._clock()
        sent = self._connected.command(position, now)
        self._connected.tick(now)
        self._steps += 1
        return sent

    def pictures(self) -> tuple[dict[str, np.ndarray], float]:
        """The newest pictures {camera: uint8 [h,w,3]} that have arrived by now, and when they were taken."""
        return self._connected.pictures(self._clock())

    def observation(self, measured: Measurement, time: int) -> Observation:
        """What a policy gets (E=1): ``measured``, the newest pictures, the instruction; ``time`` in control steps.

        Its ``privileged/*`` are those of the simulation at this moment, for scripted experts.
        """
        truth = self._connected.truth()
        bounds = (np.asarray(getattr(self.env_spec.state, end), np.float32) for end in ("low", "high"))
        state = np.clip(measured.position.astype(np.float32), *bounds)[None]
        images = {name: image[None] for name, image in self.pictures()[0].items()}
        return Observation(images, state, truth.task, np.array([time]), truth.extras)

    def disconnect(self) -> None:
        """Close the environment; safe to call twice."""
        if self._hardware is not None:
            self._hardware.close()
            self._hardware = None

    @property
    def _connected(self) -> Hardware:
        if self._hardware is None:
            raise DriverError(f"{self.spec.name} is not connected, so it cannot be used; call connect() first.")
        return self._hardware


def _tuples(imperfections: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in imperfections.items()}


if __name__ == "__main__":
    from robot_drivers.simulated_process import main

    sys.exit(main(sys.argv[1:]))
