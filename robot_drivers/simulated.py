"""The simulated robot: an environment that is commanded by joint positions, behind ``RobotDriver``, in virtual time.

Every command advances the simulation by one control step, so that an episode is the same bit for bit, and
:class:`Lockstep` plays executor, policy and person in one process.  In real time the robot is a process of its own
(``simulated_process.py``)::

    python -m robot_drivers.simulated robot.json
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from robot_drivers.driver import DriverError, Joint, Measurement, RobotSpec
from robot_drivers.executor import Executor
from robot_drivers.record import Decide, Decision, HumanInput, Query, Record
from vla_rl.contract.config import Checked, at_least, within
from vla_rl.contract.env import EnvSpec, Observation, VecEnv, on_host
from vla_rl.contract.errors import ContractError
from vla_rl.contract.load import load
from vla_rl.contract.task import extras_of, resolve


class VirtualClock:
    """Seconds that pass only when somebody says so; in place of ``time.monotonic``."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Lockstep:
    """Plays an executor, a policy and a person step by step.

    The driver takes its time from the same clock.  A decision on the observation of step ``s`` arrives before step
    ``s + delay``; the next one is asked for after that.  With equal seeds, two runs are equal bit for bit.
    """

    def __init__(
        self,
        executor: Executor,
        decide: Decide,
        observe: Callable[[Measurement, int], Observation],
        clock: VirtualClock,
        dt: float,
        delay: int = 0,
        person: Callable[[int, Measurement], HumanInput | None] | None = None,
    ) -> None:
        """``observe`` makes a policy's observation of a measurement and the number of steps of the episode so far.

        ``dt`` is the length of a control step in seconds, ``delay`` is in control steps, and ``person`` gives the
        teleoperator's input of a control step, None for no news.
        """
        self.executor, self.clock = executor, clock
        self._decide, self._observe, self._person = decide, observe, person
        self._dt, self._delay = dt, delay
        self._first_step = 0  # the step with which the episode began
        self._waiting: tuple[int, Decision] | None = None  # the step observed, and what was decided

    def begin(self, episode: int, time_limit: int) -> None:
        """The next step is the first of ``episode``; decisions that are on their way are lost."""
        self.executor.begin(episode, time_limit)
        self._first_step, self._waiting = self.executor.step, None

    def step(self) -> Record:
        executor, now = self.executor, self.clock.now
        measured = executor.measure(now)
        executor.alive(now, now)
        if self._person is not None and (read := self._person(executor.step, measured)) is not None:
            executor.human(read, now)
        self._deliver()
        if self._waiting is None and executor.asks:
            obs = self._observe(measured, executor.step - self._first_step)
            query = Query(obs, executor.step, executor.consumed, self._delay)
            self._waiting = executor.step, self._decide(query)
            self._deliver()
        record = executor.act(now)
        self.clock.now = executor.step * self._dt
        return record

    def _deliver(self) -> None:
        if self._waiting is not None and self.executor.step >= self._waiting[0] + self._delay:
            observed, decision = self._waiting
            self._waiting = None
            self.executor.decided(decision, observed)


SO101 = "sims.mujoco.tasks.so101:make"
_SUFFIX = ".pos"
_SOON = 1e-9  # seconds by which rounding may make something late


@dataclass(frozen=True)
class Simulated:
    """Which environment stands for the arm, and what its joints' motors can do.

    ``env`` is "module:make" of an environment whose actions are the targets of the joints that its state measures;
    ``options`` are its own.  ``velocity``, ``acceleration`` and ``jerk`` hold for every joint, in its unit per s, s²
    and s³, since the environment does not say; the defaults are what the SO-101's servos can do, with some reserve.
    The jerk reaches the acceleration in 6 ms.  A jerk that takes a good part of a control step for that bounds the
    change of velocity in the step instead of the acceleration.
    """

    env: str = SO101
    options: Mapping[str, Any] = field(default_factory=dict)
    velocity: float = 3.0
    acceleration: float = 50.0
    jerk: float = 8000.0


@dataclass(frozen=True)
class Imperfections(Checked):
    """How the arm falls short of the environment; nothing unless said.

    command_latency      s  from a command to the motors
    measurement_latency  s  from a measurement of the joints to its arrival
    camera_latency       s  from a picture to its arrival
    jitter               s  each of these is longer by up to so much, drawn uniformly for every message
    lost_measurements    probability that the joints do not answer in a control step
    lost_frames          probability that the pictures of a control step never arrive
    noise                standard deviation of a measured position, in the joint's unit
    offsets              [D] added to every measured position and taken off every target: a wrong calibration
    seed                 of all draws, together with that of the episode
    """

    command_latency: float = at_least(0.0, 0.0)
    measurement_latency: float = at_least(0.0, 0.0)
    camera_latency: float = at_least(0.0, 0.0)
    jitter: float = at_least(0.0, 0.0)
    lost_measurements: float = within(0.0, 0.0, 1.0)
    lost_frames: float = within(0.0, 0.0, 1.0)
    noise: float = at_least(0.0, 0.0)
    offsets: Sequence[float] = ()
    seed: int = 0


class OnItsWay(NamedTuple):
    """What is sent at the end of a control step, None where it is lost; times in seconds."""

    captured: float
    arrives: float
    content: Any


def _newest(sent: deque[OnItsWay], now: float) -> OnItsWay:
    """What has arrived last by ``now``."""
    return next((one for one in reversed(sent) if one.arrives <= now + _SOON), sent[0])


def env_spec_of(simulated: Simulated) -> EnvSpec:
    """The spec of the environment, built for it only where its module does not declare one."""
    make = load(simulated.env)
    declared = extras_of(make).spec
    if declared is not None:
        return resolve(declared)(**simulated.options)
    env = _make(simulated)
    try:
        return env.spec
    finally:
        env.close()


def robot_spec(simulated: Simulated, spec: EnvSpec) -> RobotSpec:
    """The robot that an environment of ``spec`` is; raises ContractError where actions are no joint positions."""
    names, action = spec.action.names, spec.action
    if not names or names != spec.state.names or spec.discrete:
        raise ContractError(
            f"{simulated.env} takes {', '.join(names) or 'unnamed actions'} and measures "
            f"{', '.join(spec.state.names) or 'unnamed state'}, so it is not commanded by joint positions and cannot "
            f"stand for an arm; give one whose action names equal its state names, such as {SO101!r}."
        )
    count = len(names)
    low, high = (np.broadcast_to(np.asarray(end, float), (count,)).tolist() for end in (action.low, action.high))
    units = action.unit.split(",") if "," in action.unit else [action.unit] * count
    motor = (simulated.velocity, simulated.acceleration, simulated.jerk)
    joints = (
        Joint(name.removesuffix(_SUFFIX), low[i], high[i], *motor, unit=units[i].strip())
        for i, name in enumerate(names)
    )
    return RobotSpec(spec.name, tuple(joints), control_hz=1.0 / spec.control_dt)


class Hardware:
    """One arm and its scene, advanced by :meth:`tick`, once every ``dt`` seconds of a time that the caller keeps.

    With equal seeds and equal calls it does the same bit for bit.  After the end of an episode it stands still until
    :meth:`reset`.
    """

    def __init__(self, simulated: Simulated, imperfections: Imperfections) -> None:
        self.env_spec = env_spec_of(simulated)
        self.spec = robot_spec(simulated, self.env_spec)
        count = len(self.spec.joints)
        if imperfections.offsets and len(imperfections.offsets) != count:
            raise ContractError(
                f"{len(imperfections.offsets)} offsets do not fit an arm of {count} joints, so they cannot be applied; "
                "give one per joint."
            )
        self._imperfections = imperfections
        self._offsets = np.asarray(imperfections.offsets or np.zeros(count), np.float64)
        self._env = _make(simulated)
        self.dt = self.env_spec.control_dt
        self.outcome = ""
        self._obs: Observation
        longest = max(imperfections.measurement_latency, imperfections.camera_latency) + imperfections.jitter
        kept = math.ceil(longest / self.dt) + 2  # what may still be on its way, and the newest that is not
        self._measured: deque[OnItsWay] = deque(maxlen=kept)  # positions float64 [D]
        self._taken: deque[OnItsWay] = deque(maxlen=kept)  # pictures {camera: uint8 [h,w,3]}
        self._commands: list[tuple[float, np.ndarray]] = []
        self._rng = self._late = np.random.default_rng(0)

    def reset(self, seed: int, now: float) -> None:
        """Start the episode of ``seed``; commands and measurements that are on their way are lost."""
        self._obs, self.outcome = self._env.reset([0], [seed]), ""
        self._rng, self._late = (
            np.random.Generator(np.random.PCG64([self._imperfections.seed, seed, part])) for part in range(2)
        )
        self._commands.clear()
        self._measured.clear()
        self._taken.clear()
        self._target = self._true_position()
        self._remember(now, lost=False)  # whoever asks at once gets something

    @property
    def target(self) -> np.ndarray:
        """[D]: the target in force, as it was commanded."""
        return self._target + self._offsets

    def command(self, position: np.ndarray, now: float) -> np.ndarray:
        """Take a target [D] at time ``now``; returns it within the joints' limits.  Nothing moves before the tick.

        Raises ContractError for a wrong shape or a NaN.
        """
        sent = self.spec.within(position)
        due = now + self._imperfections.command_latency + self._imperfections.jitter * self._late.random()
        # The bus keeps the order: a command that was held up holds up those behind it.
        self._commands.append((max([due, *(when for when, _ in self._commands)]), sent - self._offsets))
        return sent

    def tick(self, now: float) -> None:
        """Advance from ``now`` to ``now + dt`` with the newest target that has arrived."""
        while self._commands and self._commands[0][0] <= now + _SOON:
            self._target = self._commands.pop(0)[1]
        if not self.outcome:
            action = np.asarray(self._target, np.float32)[None, None]
            step = self._env.step(action)
            self._obs = step.obs
            self.outcome = str(step.cause[0]) if bool(step.done[0]) else ""
        self._remember(now + self.dt)

    def measured(self, now: float) -> tuple[np.ndarray, float]:
        """The newest position [D] that has arrived, and when it was measured; raises DriverError when it is lost."""
        newest = _newest(self._measured, now)
        if newest.content is None:
            raise DriverError(f"{self.spec.name}: asked for the positions of its joints and got no answer.")
        return newest.content.copy(), min(newest.captured, now)  # rounding is no future

    def pictures(self, now: float) -> tuple[dict[str, np.ndarray], float]:
        """The newest pictures {camera: uint8 [h,w,3]} that have arrived, and when they were taken."""
        newest = _newest(self._taken, now)
        return {name: image.copy() for name, image in newest.content.items()}, newest.captured

    def truth(self) -> Observation:
        """The environment's own observation (E=1), with what no robot measures."""
        return self._obs

    def close(self) -> None:
        self._env.close()

    def _true_position(self) -> np.ndarray:
        return np.asarray(on_host(self._obs.state)[0], np.float64)

    def _remember(self, captured: float, lost: bool = True) -> None:
        # As many draws in every control step, whatever is asked for: an episode is a function of its seed.
        answers, frames, *late = self._rng.random(4)
        noise = self._rng.standard_normal(len(self._offsets)) * self._imperfections.noise
        flaws = self._imperfections
        position = None if lost and answers < flaws.lost_measurements else self._true_position() + self._offsets + noise
        arrives = captured + flaws.measurement_latency + flaws.jitter * late[0]
        self._measured.append(OnItsWay(captured, arrives, position))
        if not lost or frames >= flaws.lost_frames:
            images = {name: on_host(image)[0] for name, image in self._obs.images.items()}
            arrives = captured + flaws.camera_latency + flaws.jitter * late[1]
            self._taken.append(OnItsWay(captured, arrives, images))


def _make(simulated: Simulated) -> VecEnv:
    make = load(simulated.env)
    known = inspect.signature(make).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    unknown = [name for name in simulated.options if name not in known and not open_ended]
    if unknown:
        raise ContractError(
            f"{simulated.env} has no option {unknown[0]!r}, so it cannot be made; known: {', '.join(sorted(known))}."
        )
    return make(num_envs=1, **simulated.options)


class SimulatedRobot:
    """An environment in lock-step as a robot (``RobotDriver``, ``Resets``)."""

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
        self._imperfections = Imperfections(**(imperfections or {}))
        self.env_spec: EnvSpec = env_spec_of(self._simulated)
        self.spec = robot_spec(self._simulated, self.env_spec)
        self._hardware: Hardware | None = None
        self._steps = 0
        self._clock = clock or (lambda: self._steps * self.env_spec.control_dt)

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
        if self._hardware is not None:
            self._hardware.close()
            self._hardware = None

    @property
    def _connected(self) -> Hardware:
        if self._hardware is None:
            raise DriverError(f"{self.spec.name} is not connected, so it cannot be used; call connect() first.")
        return self._hardware


if __name__ == "__main__":
    sys.exit(load("robot_drivers.simulated_process:main")(sys.argv[1:]))  # by name: it imports this module
