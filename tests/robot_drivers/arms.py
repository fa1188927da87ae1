"""Arms to test with: limits for the supervisor, a toy arm that is where it was sent, and the same in another process.

``python -m tests.robot_drivers.arms FILE LEADER`` owns a control process of the latter, until it is killed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from robot_drivers.control import ControlConfig
from robot_drivers.driver import DriverError, Joint, Measurement, RobotSpec
from robot_drivers.executor import Chunks, Executor
from robot_drivers.limits import Box, JointLimits, Limits
from robot_drivers.record import Decision, HumanInput, Query, Record
from robot_drivers.runtime import ControlProcess, Runtime
from robot_drivers.safety import Supervisor
from robot_drivers.simulated import Lockstep, VirtualClock
from vla_rl.contract.env import Observation

HZ = 50.0
DT = 1 / HZ
HERE = "tests.robot_drivers.arms"
SPEED = 0.1  # rad/s, of everybody in another process
FAR = 2.0  # rad


def two_joints(**options: object) -> Limits:
    """A quick joint and a slow one with little jerk."""
    quick = JointLimits("quick", -1.0, 1.5, velocity=3.0, acceleration=20.0, jerk=1000.0, lead=0.6, fastest=3.0)
    slow = JointLimits("slow", -0.2, 0.8, velocity=0.5, acceleration=2.0, jerk=30.0, lead=0.15, fastest=1.0)
    return Limits((quick, slow), HZ, **options)  # type: ignore[arg-type]


def so101(box: Box | None = None) -> Limits:
    """The SO-101's joints with rates that are made up."""
    ranges = {"shoulder_pan": 1.9, "shoulder_lift": 1.74, "elbow_flex": 1.69, "wrist_flex": 1.65, "wrist_roll": 2.7}
    joints = [JointLimits(name, -end, end, 2.0, 10.0, 400.0, 0.5, 5.0) for name, end in ranges.items()]
    gripper = JointLimits("gripper", 0.0, 1.0, 2.0, 20.0, 1000.0, 0.5, 5.0)
    return Limits((*joints, gripper), HZ, workspace=box)


def measured(position: object, captured: float, velocity: object = None) -> Measurement:
    speed = None if velocity is None else np.asarray(velocity, np.float64)
    return Measurement(np.asarray(position, np.float64), speed, captured)


ARM = RobotSpec(
    "toy",
    (Joint("lift", -2.0, 2.0, 2.0, 20.0, 400.0), Joint("gripper", 0.0, 1.0, 4.0, 40.0, 800.0, "1")),
    HZ,
)
LIMITS = replace(Limits.of(ARM, margin=0.0), max_age=0.1, watchdog=0.2)


class ToyArm:
    """Is at once where it was sent; ``fails`` names the calls that it does not answer."""

    spec = ARM
    is_connected = True

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.position = np.array([0.0, 0.5])
        self.commands: list[np.ndarray] = []
        self.fails: set[str] = set()
        self.outcome = ""
        self._clock = clock

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

    def alone(self, steps: int) -> list[Record]:
        """The records of control steps without a sign of the policy's process."""
        records = []
        for _ in range(steps):
            self.executor.measure(self.clock.now)
            records.append(self.executor.act(self.clock.now))
            self.clock.now += DT
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


class FileArm(ToyArm):
    """``path`` gets a line "seconds lift gripper" for each command and "end" when the arm is disconnected."""

    def __init__(self, path: str) -> None:
        super().__init__(time.monotonic)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def command(self, position: np.ndarray) -> np.ndarray:
        os.write(self._file, f"{time.monotonic()!r} {position[0]!s} {position[1]!s}\n".encode())
        return super().command(position)

    def disconnect(self) -> None:
        os.write(self._file, b"end\n")


class StuckArm(FileArm):
    """Takes every command and stays where it is."""

    def command(self, position: np.ndarray) -> np.ndarray:
        super().command(position)
        self.position = np.array([0.0, 0.5])
        return position


class PortedArm(FileArm):
    """An arm at a port."""

    def __init__(self, port: str, path: str) -> None:
        super().__init__(f"{port}/{path}")


class RestlessLeader:
    """A person holds control all the time and moves."""

    def connect(self) -> None:
        self._begun = time.monotonic()

    def read(self) -> HumanInput:
        now = time.monotonic()
        return HumanInput(now, True, np.array([SPEED * (now - self._begun), 0.5]))

    def disconnect(self) -> None: ...


def config(path: str, leader: bool = False) -> ControlConfig:
    """A control process for the arm that writes to ``path``."""
    return ControlConfig(
        f"{HERE}:FileArm",
        LIMITS.to_json(),
        {"path": path},
        "robot_drivers.executor:RecedingHorizon",
        {"steps": 10},
        teleoperator=f"{HERE}:RestlessLeader" if leader else "",
    )


def main(path: str, leader: str) -> None:
    """Print the ids of the control process and of the teleoperator, and play."""
    with closing(ControlProcess(config(path, leader == "leader"))) as control:
        print(control.pid, control.teleoperator_pid, flush=True)
        with closing(Runtime(control, towards([FAR, 0.5], 400, SPEED), observation)) as runtime:
            for _ in runtime.episode(1, 1 << 30):
                pass


if __name__ == "__main__":
    main(*sys.argv[1:])
