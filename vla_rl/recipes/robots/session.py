"""Episodes on an arm: of a real one in real time, of a simulated one in lock-step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from robot_drivers.cameras.camera import open_camera
from robot_drivers.config import Part, RobotConfig
from robot_drivers.control import ControlConfig
from robot_drivers.driver import DryRun, Measurement
from robot_drivers.executor import Executor
from robot_drivers.limits import Limits
from robot_drivers.motion import ramp
from robot_drivers.record import ControlStep, Decide, Decision, HumanInput, Query, Record
from robot_drivers.runtime import ControlProcess, ControlReport, Observe, Runtime
from robot_drivers.safety import Supervisor
from robot_drivers.simulated import Lockstep, SimulatedRobot, VirtualClock
from robot_drivers.teleop.keyboard import Foreground
from vla_rl.contract.env import Array, EnvSpec, Observation
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load
from vla_rl.recipes.robots.person import CommandLines, Display, EpisodeBar, EpisodeLines, ScriptedPerson, Waits
from vla_rl.recipes.terminal import ignored_ctrl_c

MAX_CHUNK = 64  # actions that a policy may plan at once
FAULT = "fault"  # outcome of an episode that the robot could not go on with
_ROUNDING = 1e-6  # control steps by which a delay of whole ones may seem longer


@dataclass(frozen=True)
class Execution:
    """How chunks are executed: ``chunks`` is a class of ``robot_drivers/executor.py``, at ``speed`` of all velocities.

    ``delay`` is how many seconds after an observation its chunk is there, on a robot in virtual time; it lasts whole
    control steps there, so it is rounded up.
    """

    chunks: Part
    speed: float = 1.0
    delay: float = 0.0


class Session:
    """An arm that episodes are played on; a context manager is made of it by ``contextlib.closing``.

    ``spec``: what a policy for this arm is made for.
    """

    spec: EnvSpec

    def display(self, show: Console, episodes: int) -> Display:
        """What is shown of ``episodes`` while they are played."""
        return Display()

    def prepare(self, title: str) -> None:
        """Have everything ready for the episode ``title``; raises UserError when the arm is stopped for good."""

    def play(self, decide: Decide, number: int, seed: int) -> Generator[ControlStep]:
        """The control steps of episode ``number`` (from 1), whose scene is that of ``seed`` where it can be set.

        They end before the first that is not finite, with the outcome ``FAULT`` and perhaps without any: what a broken
        sensor says is no data, and nothing learns it.
        """
        with closing(self._steps(decide, number, seed)) as steps, suppress(_BrokenSensorError):
            for step in steps:
                _check_finite(step.obs.state, step.record.position, step.record.executed.astype(np.float32))
                yield step

    def _steps(self, decide: Decide, number: int, seed: int) -> Generator[ControlStep]:
        raise NotImplementedError

    def close(self) -> None:
        """Bring the arm to rest and free everything; safe to call twice."""


def outcome_of(records: Sequence[Record]) -> str:
    """How an episode of these control steps ended."""
    return records[-1].outcome or FAULT if records else FAULT


class _BrokenSensorError(Exception):
    """What the arm measures is not finite, so nobody is asked to decide on it."""


def _measured(measured: Measurement, obs: Observation) -> Observation:
    """``obs`` of what was ``measured``; raises _BrokenSensorError."""
    _check_finite(measured.position, obs.state)
    return obs


def _check_finite(*numbers: Array) -> None:
    if not all(np.isfinite(np.asarray(item)).all() for item in numbers):
        raise _BrokenSensorError


def open_session(
    config: RobotConfig, execution: Execution, wait: Waits, person: ScriptedPerson | None = None
) -> Session:
    """The arm of ``config``, connected; raises UserError when it cannot be reached, or delayed as ``execution`` says.

    ``wait`` has a person prepare the scene of an arm that cannot do so itself; ``person`` watches a simulated one.
    """
    if load(config.driver.name) is SimulatedRobot:
        return LockstepSession(config, execution, person)
    if load(config.driver.name) is DryRun:
        return DrySession(config, execution, wait)
    if execution.delay:
        raise UserError(
            f"{config.driver.name} moves in real time, where the policy's own delay is measured, so one of "
            f"{1000 * execution.delay:g} ms cannot be set; leave --delay out, or try it on the simulated robot."
        )
    return RealTimeSession(config, execution, wait)


class _ObservedRobot(SimulatedRobot):
    """The simulated robot, with the observation of every control step kept."""

    def observe(self) -> Measurement:
        measured = super().observe()
        self.seen = self.observation(measured, 0)
        return measured


class LockstepSession(Session):
    """A simulated robot in virtual time: as fast as it can be computed, and the same bit for bit."""

    def __init__(self, config: RobotConfig, execution: Execution, person: ScriptedPerson | None = None) -> None:
        """``person`` watches, and takes over where the arm fails."""
        clock = VirtualClock()
        self._robot = _ObservedRobot(**config.driver.options, clock=clock)
        self.spec = self._robot.env_spec
        self._limit = min(self.spec.time_limit, round(config.seconds * self._robot.spec.control_hz))
        limits = config.limits_of(self._robot).scaled(execution.speed)
        supervisor = Supervisor(limits, config.chain())
        self._executor = Executor(self._robot, supervisor, execution.chunks.make())
        self._clock, self._person = clock, person
        self._delay = math.ceil(execution.delay / self.spec.control_dt - _ROUNDING)
        self._robot.connect()

    def display(self, show: Console, episodes: int) -> Display:
        return EpisodeBar(show, episodes)

    def prepare(self, title: str) -> None:
        if stopped := self._executor.supervisor.stopped:
            raise UserError(
                f"The supervisor stopped the arm before {title} ({stopped}), so it is not played; look "
                "at what the arm measures, and begin again."
            )

    def _steps(self, decide: Decide, number: int, seed: int) -> Generator[ControlStep]:
        robot, dt = self._robot, self.spec.control_dt
        self._executor.reset(seed)
        if self._person is not None:
            self._person.begin(seed)
        lockstep = Lockstep(self._executor, decide, self._observed, self._clock, dt, self._delay, self._watched)
        lockstep.begin(number, self._limit)
        time = 0
        while True:
            record = lockstep.step()
            yield ControlStep(replace(robot.seen, time=np.array([time])), record, self._executor.supervisor.stopped)
            if record.outcome:
                return
            time += 1

    def close(self) -> None:
        self._robot.disconnect()

    def _observed(self, measured: Measurement, time: int) -> Observation:
        return _measured(measured, replace(self._robot.seen, time=np.array([time])))

    def _watched(self, step: int, measured: Measurement) -> HumanInput | None:
        return None if self._person is None else self._person.look(self._robot.seen, measured, self.spec.control_dt)


class RealTimeSession(Session):
    """An arm whose control process keeps its rate, whatever the policy, cameras and recording do meanwhile."""

    def __init__(self, config: RobotConfig, execution: Execution, wait: Waits) -> None:
        self._wait, self._opened = wait, ExitStack()
        self._foreground = Foreground()
        driver = config.open()
        limits = config.limits_of(driver).scaled(execution.speed)
        steps = round(config.seconds * driver.spec.control_hz)
        with ExitStack() as opening:
            self._cameras = {name: open_camera(part.name, part.options, name) for name, part in config.cameras.items()}
            for camera in self._cameras.values():
                camera.connect()
                opening.callback(camera.disconnect)
            sizes = {name: (camera.spec.height, camera.spec.width) for name, camera in self._cameras.items()}
            self.spec = driver.spec.env_spec(sizes, config.tasks, steps, min(steps, MAX_CHUNK))
            slow, position = limits.scaled(SPEED / max(execution.speed, SPEED)), config.home_of(driver)
            self._home = None if position is None else Home(position, slow, 1 / driver.spec.control_hz)
            control = ControlProcess(_control_config(config, limits.to_json(), execution))
            self._control = opening.enter_context(closing(control))
            self._opened = opening.pop_all()

    def display(self, show: Console, episodes: int) -> Display:
        return EpisodeLines(show, episodes)

    def prepare(self, title: str) -> None:
        while True:
            self._arm()
            self._go_home(title)
            if not self._control.resets and not self._control.newest().stopped:
                self._wait(f"{title}: prepare the scene, then press Enter.", self._control)
            if not self._control.newest().stopped:
                return

    def _steps(self, decide: Decide, number: int, seed: int) -> Generator[ControlStep]:
        if self._control.resets:
            self._control.reset(seed)
        with closing(Runtime(self._control, decide, self._observation, pictured=self._pictured)) as runtime:
            for step in runtime.episode(number, self.spec.time_limit):
                yield step
                if step.stopped and not self._control.teleoperator_pid:
                    self._control.end("stopped")  # nobody could re-arm it meanwhile

    def between_episodes(self) -> Iterator[ControlReport]:
        """Control steps for ever, in which nobody but a person moves the arm."""
        while True:
            yield self._control.receive()

    def close(self) -> None:
        """Bring the arm to rest and free everything; Ctrl-C has to wait, for the arm and the terminal."""
        with ignored_ctrl_c():
            self._opened.close()
            self._foreground.wait()

    def _arm(self) -> None:
        """Have a person re-arm the arm where it is stopped, and say whether it is where it is measured."""
        while (report := self._control.newest()).stopped:
            there, says = None, "re-arms it"
            if report.elsewhere and np.isfinite(report.record.position).all():
                there, says = report.record.position, f"says that it is there ({report.elsewhere}) and re-arms it"
            self._wait(f"The arm is stopped: {report.stopped}. Look at it; Enter {says}.", self._control)
            self._control.rearm(there)
            while self._control.receive().rearmed == report.rearmed:
                pass

    def _go_home(self, title: str) -> None:
        """Have the arm where it should begin; a person lets it move, and hears when it did not arrive."""
        if self._home is None or self._control.resets:
            return
        if not self._home.missed(self._control.newest().record.position):
            return
        self._wait(f"{title}: the arm goes home slowly. Clear its way, then press Enter.", self._control)
        with suppress(_BrokenSensorError):  # the supervisor has stopped the arm, which a person is told next
            self._home.go(self._control, self._observation)
        missed = self._home.missed(self._control.newest().record.position)
        if missed and not self._control.newest().stopped:
            self._wait(f"{missed}, where the arm came to rest. Look at it; Enter goes on from there.", self._control)

    def _observation(self, measured: Measurement, time: int) -> Observation:
        images = {name: camera.read().image[None] for name, camera in self._cameras.items()}
        state = measured.position.astype(np.float32)[None]
        return _measured(measured, Observation(images, state, np.zeros(1, np.int64), np.array([time])))

    def _pictured(self) -> float:
        """When the oldest of the newest pictures was captured; the present where there is no camera."""
        return min((camera.read().captured for camera in self._cameras.values()), default=time.monotonic())


class DrySession(RealTimeSession):
    """An arm that is measured and sent nothing: every command is a line."""

    def display(self, show: Console, episodes: int) -> Display:
        return CommandLines(show, self.spec.action.names)


def dry(config: RobotConfig) -> RobotConfig:
    """The same robot, sent nothing, so it goes nowhere; raises UserError for one whose time passes by commands."""
    if load(config.driver.name) is SimulatedRobot:
        raise UserError(
            "This robot is simulated in virtual time, which passes by commands, so nothing would happen in a dry run; "
            "leave --dry-run out: nothing real is moved."
        )
    return replace(
        config,
        home=None,
        driver=Part(
            "robot_drivers.driver:DryRun", {"driver": config.driver.name, "options": dict(config.driver.options)}
        ),
    )


def _control_config(config: RobotConfig, limits: Mapping[str, Any], execution: Execution) -> ControlConfig:
    teleoperator = config.teleoperator or Part("")
    return ControlConfig(
        driver=config.driver.name,
        driver_options=dict(config.driver.options),
        limits=limits,
        chunks=execution.chunks.name,
        chunks_options=dict(execution.chunks.options),
        kinematics=config.kinematics,
        teleoperator=teleoperator.name,
        teleoperator_options=dict(teleoperator.options),
    )


SPEED = 0.25  # share of the velocity limits, at most
_NEAR = 0.03  # share of a joint's range by which an arm may miss its home, because it sags
_SETTLED = 0.5  # s for which the arm has to stand still: at home, or where something holds it
_STILL = 0.02  # share of the way that it would go meanwhile, at most
_SPARE = 3.0  # s, beyond twice what the way takes, until it is given up
_NUMBER = 1 << 40  # of these episodes, which nobody records


class Home:
    """Where an arm waits between episodes (``record.Decide``: on the rest of the way to there).

    position  [D], in the joints' units
    limits    of the arm; its velocities are those of a run, of which the way has a quarter at most
    """

    def __init__(self, position: np.ndarray, limits: Limits, control_dt: float) -> None:
        self._position, self._dt = position, control_dt
        self._names = [joint.name for joint in limits.joints]
        self._velocity = np.array([joint.velocity for joint in limits.joints])
        self._range = np.array([joint.high - joint.low for joint in limits.joints])

    def __call__(self, query: Query) -> Decision:
        """Chunk [H,D] from where the arm is seen to its home, which is then held: a way planned anew would swing it."""
        way = self._way(np.asarray(query.obs.state[0], np.float64))
        return Decision(np.concatenate([way, np.repeat(way[-1:], math.ceil(2 * _SETTLED / self._dt), axis=0)]))

    def missed(self, position: np.ndarray) -> str:
        """Which joint is how far from home, of an arm at ``position`` [D]; "" for one that is there."""
        away = position - self._position
        worst = int(np.argmax(np.abs(away) / self._range))
        far = abs(away[worst]) > _NEAR * self._range[worst]
        return f"{self._names[worst]} is {away[worst]:+.3g} from home" if far else ""

    def go(self, control: ControlProcess, observe: Observe) -> None:
        """Move the arm there; returns when it is, when it is stopped, and when that takes far too long.

        A person may take over meanwhile, and then decides where the arm is.  Raises what ``Runtime.episode`` does.
        """
        steps = 2 * len(self._way(control.newest().record.position)) + math.ceil(_SPARE / self._dt)
        seen: deque[np.ndarray] = deque(maxlen=1 + math.ceil(_SETTLED / self._dt))  # since the arm was sent home
        with closing(Runtime(control, self, observe)) as runtime:
            for step in runtime.episode(_NUMBER, steps):
                if seen or step.record.source == "policy":
                    seen.append(step.record.position)
                if step.stopped or (len(seen) == seen.maxlen and self._still(seen[0], seen[-1])):
                    control.end("home")

    def _still(self, before: np.ndarray, after: np.ndarray) -> bool:
        return bool((np.abs(after - before) <= _STILL * _SETTLED * self._velocity).all())

    def _way(self, start: np.ndarray) -> np.ndarray:
        return ramp(start, self._position, self._velocity, self._dt)
