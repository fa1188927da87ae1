"""What ``vla-rl robot check`` finds out about ports and about the teleoperator."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from robot_drivers.config import Part, RobotConfig
from robot_drivers.control import human_input
from robot_drivers.devices import joysticks, serial_ports
from robot_drivers.findings import Finding
from robot_drivers.human import HumanInput
from robot_drivers.limits import Limits
from vla_rl.contract.child import Child, ChildError
from vla_rl.contract.errors import UserError

_START = 30.0  # seconds until a teleoperator is read
_SILENT = 5.0  # seconds until its next input
_OPTIONS = {"port": serial_ports, "device": joysticks}


def check_ports(config: RobotConfig) -> Iterator[Finding]:
    """Whether what arm and teleoperator are connected to is there."""
    for whose, part in (("arm", config.driver), ("teleoperator", config.teleoperator)):
        for option, plugged in _OPTIONS.items():
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
    yield _answers(inputs, ages, limits)
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


def _answers(inputs: list[HumanInput], ages: list[float], limits: Limits) -> Finding:
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
