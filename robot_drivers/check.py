"""Whether an arm delivers what it declares, without moving it: what ``vla-rl robot check`` prints.

Nothing is commanded.  Drivers switch the torque on with their first command, so an arm that is limp stays limp.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from robot_drivers.cameras.camera import Camera, open_camera
from robot_drivers.config import Part, RobotConfig
from robot_drivers.control import human_input
from robot_drivers.driver import Calibrates, DriverError, Measurement, RobotDriver, connected
from robot_drivers.limits import Limits
from robot_drivers.record import HumanInput
from robot_drivers.runtime import PATIENCE
from robot_drivers.setup import DEVICES
from vla_rl.contract.child import Child, ChildError
from vla_rl.contract.errors import UserError

_STILL = 1e-9  # of a clock that has not moved on
_RATE = 0.9  # of the declared rate, at least


def check_robot(
    config: RobotConfig,
    seconds: float = 3.0,
    policy: Callable[[], PolicyTiming] | None = None,
) -> Iterator[Finding]:
    """Look at ports, arm, cameras and teleoperator of ``config`` for ``seconds`` each, line by line as they are known.

    ``policy`` measures what decisions take.  All are disconnected at the end.  Raises nothing that has to do with
    them: that is a finding.
    """
    budget = LatencyBudget(math.nan)
    yield from check_ports(config)
    yield from _arm(config, seconds, budget)
    for name in config.cameras:
        yield _camera(config, name, seconds, budget)
    if math.isnan(budget.control_hz):
        return  # of an arm that does not exist, nothing more can be said
    if config.teleoperator is not None:
        yield from check_teleoperator(config.teleoperator, config.limits_of(config.open()), seconds)
    try:
        timing = None if policy is None else policy()
    except (UserError, ImportError) as error:
        yield Finding.of("policy", error)
        return
    yield from budget.findings(timing)


def _arm(config: RobotConfig, seconds: float, budget: LatencyBudget) -> Iterator[Finding]:
    """What is found about the arm; ends where nothing more can be found.  Its part of the latency is noted."""
    try:
        driver = config.open()
        limits = config.limits_of(driver)
        spec = driver.spec
        yield Finding("arm", f"{spec.name}: {len(spec.joints)} joints at {spec.control_hz:g} Hz")
        budget.control_hz = spec.control_hz
        config.home_of(driver)
        yield Finding("limits", _limits(limits))
        with connected(driver, config.driver.options):
            yield Finding("connection", "the arm answers")
            if isinstance(driver, Calibrates):
                if not driver.is_calibrated:  # its readings mean no angles
                    wrong = "missing, or not that of the file"
                    yield Finding("calibration", wrong, "run 'vla-rl robot calibrate'.")
                    return
                yield Finding("calibration", "the servos hold that of the file")
            yield from _measurements(driver, limits, seconds, budget)
    except (UserError, DriverError, ImportError) as error:
        yield Finding.of("stopped here", error)


def _camera(config: RobotConfig, name: str, seconds: float, budget: LatencyBudget) -> Finding:
    part = config.cameras[name]
    try:
        camera = open_camera(part.name, part.options, name)
        camera.connect()
    except UserError as error:
        return Finding.of(f"camera {name}", error)
    try:
        time.sleep(seconds)
        now = time.monotonic()
        budget.pictures = max(budget.pictures or 0.0, now - camera.read().captured)
        return _pictures(camera, now)
    finally:
        camera.disconnect()


def _pictures(camera: Camera, now: float) -> Finding:
    """Size, rate and age of what a camera has delivered until ``now``."""
    spec, age = camera.spec, now - camera.read().captured
    text = (
        f"{spec.width}x{spec.height} at {camera.fps:.1f} of {spec.fps:g} pictures/s, the newest {1e3 * age:.0f} ms old"
    )
    text = f"{text}, {camera.error}" if camera.error else text
    cure = ""
    if camera.stale(now) or camera.failures:
        cure = f"it failed {camera.failures} times: look at its cable, and at who else uses it."
    elif camera.fps < _RATE * spec.fps:
        cure = "it is slower than its file says: set fps to what it delivers, or give it a smaller size, MJPG or light."
    return Finding(f"camera {camera.name}", text, cure)


def _limits(limits: Limits) -> str:
    fastest = max(limits.joints, key=lambda joint: joint.velocity / (joint.high - joint.low))
    space = limits.workspace
    box = "no workspace" if space is None else f"workspace {space.low} to {space.high} m"
    switch = "held switch needed" if limits.deadman else "no held switch"
    return (
        f"{fastest.name} up to {fastest.velocity:.3g}/s; rest after {limits.watchdog:g} s of silence; {box}; {switch}"
    )


def _measurements(driver: RobotDriver, limits: Limits, seconds: float, budget: LatencyBudget) -> Iterator[Finding]:
    """Measure at the control rate, and look at what came and when."""
    period, found, lasted, lost = 1 / driver.spec.control_hz, [], [], []
    started = time.monotonic()
    for step in range(max(2, round(seconds / period))):
        time.sleep(max(0.0, started + step * period - time.monotonic()))
        asked = time.monotonic()
        try:
            found.append(driver.observe())
            lasted.append(time.monotonic() - asked)
        except DriverError as error:
            lost.append(str(error))
    took = time.monotonic() - started
    answers = f"{len(found)} of {len(found) + len(lost)}"
    if lost:
        answers += f", the first that was lost: {lost[0]}"
    yield Finding("answers", answers, "look at its power, cables and bus, and at what else uses them." if lost else "")
    if not found:
        return
    budget.measurement = float(np.quantile(lasted, 0.99))
    shapes = _shapes(found, len(limits.joints))
    yield shapes
    if shapes.good:
        yield _within(found[-1], limits)
    yield _stamps(found, limits)
    yield _rate(np.array(lasted), len(found) / took, period)


def _shapes(found: list[Measurement], joints: int) -> Finding:
    wrong = {one.position.shape for one in found} - {(joints,)}
    finite = all(np.isfinite(one.position).all() for one in found)
    if wrong or not finite:
        what = f"shape {wrong.pop()}" if wrong else "values that are not finite"
        return Finding("positions", f"{what} where {joints} angles are declared", "mend the driver.")
    spread = np.ptp([one.position for one in found], axis=0).max()
    return Finding("positions", f"{joints} finite values; at rest they vary by up to {spread:.2g}")


def _within(last: Measurement, limits: Limits) -> Finding:
    beyond = [
        f"{joint.name} at {value:.3g} (from {joint.low:.3g} to {joint.high:.3g})"
        for joint, value in zip(limits.joints, last.position, strict=True)
        if not joint.low <= value <= joint.high
    ]
    if beyond:
        return Finding("within limits", f"no: {', '.join(beyond)}", "move the arm inside by hand first.")
    return Finding("within limits", "all joints")


def _stamps(found: list[Measurement], limits: Limits) -> Finding:
    steps = np.diff([one.captured for one in found])
    if len(steps) and steps.min() < -_STILL:
        return Finding("time stamps", "run backwards, so the supervisor would stop", "mend the driver.")
    stood = float((steps <= _STILL).mean()) if len(steps) else 0.0
    longest = float(steps.max(initial=0.0))
    text = f"up to {1e3 * longest:.1f} ms apart, {stood:.0%} repeated"
    late = f"after {1e3 * limits.max_age:.0f} ms the arm is stopped: look at its bus, and at what runs beside."
    return Finding("time stamps", text, late if longest > limits.max_age else "")


def _rate(lasted: np.ndarray, hz: float, period: float) -> Finding:
    half, most = np.quantile(lasted, (0.5, 0.99))
    share = most / period
    text = f"{hz:.1f} Hz of {1 / period:g}; a measurement takes {1e3 * half:.1f} ms, 99 % at most {1e3 * most:.1f} ms"
    cure = "lower the arm's control_hz, or look at its bus and at what runs beside."
    return Finding("rate", f"{text} ({share:.0%} of a control step)", cure if share > 1.0 else "")


_START = 30.0  # seconds until a teleoperator is read
_SILENT = 5.0  # seconds until its next input


def check_ports(config: RobotConfig) -> Iterator[Finding]:
    """Whether what arm and teleoperator are connected to is there."""
    for whose, part in (("arm", config.driver), ("teleoperator", config.teleoperator)):
        for option, plugged in DEVICES.items():
            port = part.options.get(option) if part else None
            if port is None:
                continue
            found = plugged()
            if Path(str(port)).exists() or port in found:
                yield Finding(f"{option} of the {whose}", f"{port} is there")
            else:
                others = f"plugged in: {', '.join(found)}" if found else "nothing is plugged in"
                cure = f"plug it in, or correct {option!r} in the robot's file."
                yield Finding(f"{option} of the {whose}", f"{port} is not there ({others})", cure)


def check_teleoperator(part: Part, limits: Limits, seconds: float) -> Iterator[Finding]:
    """Read the teleoperator in a process of its own, as control does, and look at what it says for ``seconds``."""
    child = Child([sys.executable, "-m", "robot_drivers.teleop.process"], name="control")
    try:
        child.send({"teleoperator": part.name, "options": dict(part.options)})
        inputs, ages = _read(child, seconds)
    except UserError as error:
        yield Finding.of("teleoperator", error)
        return
    except ChildError as error:
        last = child.last_words().splitlines()[-1:] or [""]
        yield Finding("teleoperator", f"its process {error}: {last[0]}", "plug it in, and look at its options.")
        return
    finally:
        child.kill()
        child.close()
    yield _device_answers(inputs, ages, limits)
    yield _joints(inputs, len(limits.joints))


def _read(child: Child, seconds: float) -> tuple[list[HumanInput], list[float]]:
    """The inputs of ``seconds``, two at least, and how old each was when it came."""
    inputs: list[HumanInput] = []
    ages: list[float] = []
    began, patience = time.monotonic(), _START
    while len(inputs) < 2 or time.monotonic() < began + seconds:
        message = child.receive(time.monotonic() + patience)
        if "failed" in message:
            raise UserError(message["failed"])
        inputs.append(human_input(message))
        ages.append(time.monotonic() - inputs[-1].captured)
        began, patience = began if len(inputs) > 1 else time.monotonic(), _SILENT
    return inputs, ages


def _device_answers(inputs: list[HumanInput], ages: list[float], limits: Limits) -> Finding:
    stamps = np.array([one.captured for one in inputs])
    most = float(np.quantile(ages, 0.99) + np.diff(stamps).max())
    hz = (len(inputs) - 1) / max(float(np.ptp(stamps)), 1e-9)
    text = f"{hz:.0f} inputs/s, never older than {1e3 * most:.0f} ms"
    if most <= limits.max_age:
        return Finding("teleoperator", text)
    cure = (
        f"inputs older than {1e3 * limits.max_age:.0f} ms are not followed: look at its cable, and at what runs beside."
    )
    return Finding("teleoperator", text, cure)


def _joints(inputs: list[HumanInput], joints: int) -> Finding:
    """Whether it says as many positions or velocities as the arm has joints."""
    name = "its joints"
    said = [array for one in inputs for array in (one.position, one.velocity) if array is not None]
    if not said:
        text = f"neither positions nor velocities in {len(inputs)} inputs"
        return Finding(name, text, "look at its cable and its calibration.")
    wrong = {array.shape for array in said} - {(joints,)}
    if wrong:
        text = f"{list(wrong.pop())} numbers where the arm has {joints} joints"
        return Finding(name, text, "set its options, or choose a teleoperator for this arm.")
    if not all(np.isfinite(array).all() for array in said):
        return Finding(name, "values that are not finite", "calibrate it.")
    kind = "positions" if inputs[-1].position is not None else "velocities"
    return Finding(name, f"{joints} {kind}, as the arm has")


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it: ``cure`` is "" where it will do."""

    name: str
    result: str
    cure: str = ""

    @property
    def good(self) -> bool:
        return not self.cure

    @classmethod
    def of(cls, name: str, error: Exception) -> Finding:
        """Something that cannot be found out, by an error whose text ends with the cure."""
        what, _, cure = str(error).rpartition("; ")
        return cls(name, what, cure) if what else cls(name, str(error), "look at it, and check again.")

    def __str__(self) -> str:
        return f"{self.name}: {self.result}{f'; {self.cure}' if self.cure else ''}"


@dataclass(frozen=True)
class PolicyTiming:
    """Decisions that were measured: seconds [N] of each, and how many actions their chunk has."""

    seconds: np.ndarray
    horizon: int


@dataclass
class LatencyBudget:
    """The parts of the delay that are known, in seconds: 99 % of them take at most so long.

    pictures     age of the camera's newest picture that is oldest; None without cameras
    measurement  what it takes to measure the joints; None where they do not answer
    """

    control_hz: float
    pictures: float | None = None
    measurement: float | None = None

    def findings(self, policy: PolicyTiming | None) -> Iterator[Finding]:
        """The latency in control steps and, of a policy that was measured, which execution fits."""
        parts = {"pictures": self.pictures, "joints": self.measurement}
        known = {name: part for name, part in parts.items() if part is not None}
        text = " + ".join(f"{name} {1e3 * part:.0f} ms" for name, part in known.items()) or "nothing was measured"
        before = sum(known.values())
        if policy is None:
            yield Finding("latency", f"{text}; with --policy CHECKPOINT its decisions are measured too")
            return
        half, most = (float(share) for share in np.quantile(policy.seconds, (0.5, 0.99)))
        delay = max(1, math.ceil(most * self.control_hz))
        total = math.ceil((before + most) * self.control_hz)
        text = f"{text} + decision {1e3 * half:.0f} ms (99 % at most {1e3 * most:.0f} ms)"
        late = f"{1e3 * (before + most):.0f} ms, {total} control steps of {1e3 / self.control_hz:.0f} ms"
        slow = most > PATIENCE
        cure = f"decisions later than {PATIENCE:g} s are not executed: take a faster computer or a smaller policy."
        yield Finding("latency", f"{text} = {late}", cure if slow else "")
        yield self._execution(delay, policy.horizon)

    def _execution(self, delay: int, horizon: int) -> Finding:
        """Whether a chunk lasts until the next one is there: D <= steps <= H - D (real-time chunking, Black et al.)."""
        lasts = f"a chunk has {horizon} actions ({horizon / self.control_hz:.2f} s) and comes {delay} steps late"
        if horizon >= 2 * delay:
            return Finding(
                "execution",
                f"{lasts}: receding_horizon and real-time chunking with --steps {delay} to {horizon - delay}, "
                f"temporal_ensembling; open_loop stands still for {delay} steps between chunks",
            )
        return Finding(
            "execution",
            f"{lasts}, so it is over before the next one is there",
            "run with --execution open_loop, or take a faster computer or a policy with longer chunks.",
        )
