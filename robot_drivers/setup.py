"""Ask a person what a robot consists of, and write its file: ``vla-rl robot setup``."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import Asks
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load

ARMS = {"so101": "robot_drivers.so101:SO101"}


def setup(path: Path, ask: Asks) -> RobotConfig:
    """Ask for arm, options and task, and write the file ``path``.

    Raises UserError where a file is already, for an arm that does not exist, and for an option that has no answer.
    """
    if path.exists():
        raise UserError(f"{str(path)!r} exists already, so it is not overwritten; choose another name.")
    driver = _arm(ask)
    task = ask("What is the arm told to do? One sentence, for example: pick up the cube.").strip()
    config = RobotConfig(driver, tasks=(task,))
    config.open()  # refuses options of a wrong kind before anything is written
    config.save(path)
    return config


def serial_ports() -> list[str]:
    """The serial ports of this machine, with what is plugged in; none where pyserial is not installed."""
    try:
        from serial.tools.list_ports import comports
    except ModuleNotFoundError:
        return []
    return [f"{port.device} ({port.description})" for port in comports() if port.vid is not None]


def _arm(ask: Asks) -> Part:
    given = (
        ask(f"Which arm? {', '.join(ARMS)}, or module:Class of a driver of yours (Enter: so101).").strip() or "so101"
    )
    if ":" not in given and given not in ARMS:
        raise UserError(f"{given!r} is no arm that is known, so it cannot be set up; {did_you_mean(given, ARMS)}")
    name = ARMS.get(given, given)
    return Part(name, _options(name, ask))


def _options(name: str, ask: Asks) -> dict[str, Any]:
    """One question for each option; Enter takes the default."""
    options = {}
    for option in inspect.signature(load(name)).parameters.values():
        needed = option.default is inspect.Parameter.empty
        answer = ask(_question(option, needed)).strip()
        if not answer and needed:
            raise UserError(f"{name} needs {option.name!r}, so nothing is written; begin again and give it.")
        if answer:
            options[option.name] = _value(answer)
    return options


def _question(option: inspect.Parameter, needed: bool) -> str:
    ports = serial_ports() if option.name == "port" else []
    found = f" Plugged in: {', '.join(ports)}." if ports else ""
    return f"{option.name}?{found}" + ("" if needed else f" (Enter: {option.default!r})")


def _value(answer: str) -> Any:
    """A number, boolean, list or text."""
    try:
        return json.loads(answer)
    except ValueError:
        return answer
