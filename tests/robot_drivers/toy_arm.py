"""A small arm whose joints are where they were commanded, for tests of what is around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from robot_drivers.driver import DriverError, Joint, Measurement, RobotSpec
from robot_drivers.executor import Chunks, Executor
from robot_drivers.limits import Limits
from robot_drivers.record import Decision, HumanInput, Query, Record
from robot_drivers.safety import Supervisor
from robot_drivers.simulated import Lockstep, VirtualClock
from vla_rl.contract.env import Observation

HZ = 50.0
DT = 1 / HZ
ARM = RobotSpec(
    "toy",
    (Joint("lift", -2.0, 2.0, 2.0, 20.0, 400.0), Joint("gripper", 0.0, 1.0, 4.0, 40.0, 800.0, "1")),
    HZ,
)
LIMITS = replace(Limits.of(ARM, margin=0.0), max_age=0.1, watchdog=0.2)


class ToyArm:
    """Is at once where it was sent; ``fails`` names the calls that it does not answer."""

    spec = ARM

    def __init__(self, clock: Callable[[], float]) -> None:
        self.position = np.array([0.0, 0.5])
        self.commands: list[np.ndarray] = []
        self.fails: set[str] = set()
        self.outcome = ""
        self._clock = clock

    is_connected = True

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def observe(self) -> Measurement:
        if "observe" in self.fails:
            raise DriverError("lift did not answer")
        return Measurement(self.position.copy(), None, self._clock())

    def command(self, position: np.ndarray) -> np.ndarray:
        if "command" in self.fails:
            raise DriverError("lift took nothing")
        self.commands.append(position.copy())
        self.position = position.astype(np.float32).astype(np.float64)
        return self.position.copy()


def observation(measured: Measurement, time: int) -> Observation:
    """What a policy sees: the joints."""
    state = measured.position.astype(np.float32)[None]
    return Observation({}, state, np.zeros(1, np.int64), np.full(1, time))


def towards(goal: npt.ArrayLike, length: int = 8, speed: float = 0.5) -> Callable[[Query], Decision]:
    """A policy that goes from where it sees the arm to ``goal`` [2] at ``speed`` per second."""

    def decide(query: Query) -> Decision:
        way = np.asarray(goal) - np.asarray(query.obs.state[0], np.float64)
        steps = np.arange(1, length + 1)[:, None] * speed * DT
        return Decision(query.obs.state[0] + np.clip(way, -steps, steps), policy_version=7)

    return decide


class EpisodesInLockstep(Lockstep):
    def episode(self, number: int, time_limit: int) -> list[Record]:
        """The records of episode ``number``, which ends by its outcome or after ``time_limit`` steps."""
        self.begin(number, time_limit)
        records = [self.step()]
        while not records[-1].outcome:
            records.append(self.step())
        return records


def lockstep(
    chunks: Chunks,
    decide: Callable[[Query], Decision],
    delay: int = 0,
    person: Callable[[int, Measurement], HumanInput | None] | None = None,
) -> tuple[EpisodesInLockstep, ToyArm]:
    """A toy arm with everything around it, in virtual time."""
    clock = VirtualClock()
    arm = ToyArm(clock)
    executor = Executor(arm, Supervisor(LIMITS), chunks, attended=person is not None)
    return EpisodesInLockstep(executor, decide, observation, clock, DT, delay, person), arm
