"""Whether an arm delivers what it declares, without moving it: what ``vla-rl robot check`` prints.

Nothing is commanded.  Drivers switch the torque on with their first command, so an arm that is limp stays limp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from robot_drivers.cameras.camera import Camera, open_camera
from robot_drivers.config import RobotConfig
from robot_drivers.driver import Calibrates, DriverError, Measurement, RobotDriver
from robot_drivers.limits import Limits
from vla_rl.contract.errors import ContractError, UserError

_STILL = 1e-9  # of a clock that has not moved on
_RATE = 0.9  # of the declared rate, at least


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and whether it will do."""

    name: str
    result: str
    good: bool = True


@dataclass(frozen=True)
class Clock:
    """Where time comes from; tests bring their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def check_robot(config: RobotConfig, seconds: float = 3.0, clock: Clock | None = None) -> Iterator[Finding]:
    """Look at the arm and at each camera of ``config`` for ``seconds``, line by line as they are known.

    All are disconnected at the end.  Raises nothing that has to do with them: that is a finding.
    """
    yield from _arm(config, seconds, clock or Clock())
    for name in config.cameras:
        yield _camera(config, name, seconds, clock or Clock())


def _arm(config: RobotConfig, seconds: float, clock: Clock) -> Iterator[Finding]:
    """What is found about the arm; ends where nothing more can be found."""
    try:
        driver = config.open()
        limits = config.limits_of(driver)
        spec = driver.spec
        yield Finding("arm", f"{spec.name}: {len(spec.joints)} joints at {spec.control_hz:g} Hz")
        yield Finding("limits", _limits(limits))
        with _connected(driver):
            yield Finding("connection", "the arm answers")
            if isinstance(driver, Calibrates):
                calibration = _calibration(driver)
                yield calibration
                if not calibration.good:
                    return  # its readings mean no angles
            yield from _measurements(driver, limits, seconds, clock)
    except (UserError, ContractError, DriverError) as error:
        yield Finding("stopped here", str(error), good=False)


def _camera(config: RobotConfig, name: str, seconds: float, clock: Clock) -> Finding:
    part = config.cameras[name]
    try:
        camera = open_camera(part.name, part.options, name)
        camera.connect()
    except UserError as error:
        return Finding(f"camera {name}", str(error), good=False)
    try:
        clock.sleep(seconds)
        return _pictures(camera, clock.now())
    finally:
        camera.disconnect()


def _pictures(camera: Camera, now: float) -> Finding:
    """Size, rate and age of what a camera has delivered until ``now``."""
    spec, age = camera.spec, now - camera.read().captured
    text = (
        f"{spec.width}x{spec.height} at {camera.fps:.1f} of {spec.fps:g} pictures/s, the newest {1e3 * age:.0f} ms old"
    )
    good = camera.fps >= _RATE * spec.fps and not camera.stale(now) and not camera.failures
    return Finding(f"camera {camera.name}", f"{text}{f'; {camera.error}' if camera.error else ''}", good)


@contextmanager
def _connected(driver: RobotDriver) -> Iterator[None]:
    driver.connect()
    try:
        yield
    finally:
        driver.disconnect()


def _calibration(driver: Calibrates) -> Finding:
    if driver.is_calibrated:
        return Finding("calibration", "the servos hold that of the file")
    return Finding("calibration", "missing, or not that of the file; run 'vla-rl robot calibrate'", good=False)


def _limits(limits: Limits) -> str:
    fastest = max(limits.joints, key=lambda joint: joint.velocity / (joint.high - joint.low))
    space = limits.workspace
    box = "no workspace" if space is None else f"workspace {space.low} to {space.high} m"
    switch = "held switch needed" if limits.deadman else "no held switch"
    return (
        f"{fastest.name} up to {fastest.velocity:.3g}/s; rest after {limits.watchdog:g} s of silence; {box}; {switch}"
    )


def _measurements(driver: RobotDriver, limits: Limits, seconds: float, clock: Clock) -> Iterator[Finding]:
    """Measure at the control rate, and look at what came and when."""
    period, found, lasted, lost = 1 / driver.spec.control_hz, [], [], []
    started = clock.now()
    for step in range(max(2, round(seconds / period))):
        clock.sleep(max(0.0, started + step * period - clock.now()))
        asked = clock.now()
        try:
            found.append(driver.observe())
            lasted.append(clock.now() - asked)
        except DriverError as error:
            lost.append(str(error))
    took = clock.now() - started
    yield _answers(len(found), lost)
    if not found:
        return
    shapes = _shapes(found, len(limits.joints))
    yield shapes
    if shapes.good:
        yield _within(found[-1], limits)
    yield _stamps(found, limits)
    yield _rate(np.array(lasted), len(found) / took, period)


def _answers(answered: int, lost: list[str]) -> Finding:
    asked = answered + len(lost)
    if not lost:
        return Finding("answers", f"{answered} of {asked}")
    return Finding("answers", f"{answered} of {asked}; the first that was lost: {lost[0]}", good=False)


def _shapes(found: list[Measurement], joints: int) -> Finding:
    wrong = {one.position.shape for one in found} - {(joints,)}
    finite = all(np.isfinite(one.position).all() for one in found)
    if wrong or not finite:
        what = f"shape {wrong.pop()}" if wrong else "values that are not finite"
        return Finding("positions", f"{what} where {joints} angles are declared", good=False)
    spread = np.ptp([one.position for one in found], axis=0).max()
    return Finding("positions", f"{joints} finite values; at rest they vary by up to {spread:.2g}")


def _within(last: Measurement, limits: Limits) -> Finding:
    beyond = [
        f"{joint.name} at {value:.3g} (from {joint.low:.3g} to {joint.high:.3g})"
        for joint, value in zip(limits.joints, last.position, strict=True)
        if not joint.low <= value <= joint.high
    ]
    if beyond:
        return Finding("within limits", f"no: {', '.join(beyond)}; move the arm inside by hand first", good=False)
    return Finding("within limits", "all joints")


def _stamps(found: list[Measurement], limits: Limits) -> Finding:
    steps = np.diff([one.captured for one in found])
    if len(steps) and steps.min() < -_STILL:
        return Finding("time stamps", "run backwards, so the supervisor would stop; mend the driver", good=False)
    stood = float((steps <= _STILL).mean()) if len(steps) else 0.0
    longest = float(steps.max(initial=0.0))
    good = longest <= limits.max_age
    return Finding("time stamps", f"up to {1e3 * longest:.1f} ms apart, {stood:.0%} repeated", good)


def _rate(lasted: np.ndarray, hz: float, period: float) -> Finding:
    half, most = np.quantile(lasted, (0.5, 0.99))
    share = most / period
    text = f"{hz:.1f} Hz of {1 / period:g}; a measurement takes {1e3 * half:.1f} ms, 99 % at most {1e3 * most:.1f} ms"
    return Finding("rate", f"{text} ({share:.0%} of a control step)", good=share <= 1.0)
