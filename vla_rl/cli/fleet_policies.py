"""``vla-rl fleet versions|publish|try|promote|rollback|pin|unpin FOLDER ...``: beside a running server, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError
from vla_rl.contract.intervals import wilson
from vla_rl.fleet.canary import Outcomes
from vla_rl.fleet.releases import EVERY_ROBOT
from vla_rl.recipes.fleet.policies import open_registry, signing_key, user
from vla_rl.recipes.progress import console


@dataclass(frozen=True)
class Look:
    """Print the policies of a fleet: their stage, and how they did on the robots."""


@dataclass(frozen=True)
class Change:
    """Change which policy the robots run from their next episode on; the server may be running."""

    why: str = ""  # for the registry's history


@dataclass(frozen=True)
class Publish(Change):
    """Put a checkpoint or a run's best into the registry; no robot runs it before try or promote."""

    credentials: str = ""  # the folder with the signing key; "": FOLDER, as vla-rl serve without certificates has it


@dataclass(frozen=True)
class Try(Change):
    """Have some of the robots that have played before run a version, which is taken back when it does worse."""

    robot: tuple[str, ...] = ()  # choose of these instead


@dataclass(frozen=True)
class Pin(Change):
    """Keep a robot on a version, whatever is promoted."""

    robot: str = EVERY_ROBOT  # "*": every one without a pin of its own


def versions(given: list[str]) -> None:
    """``vla-rl fleet versions FOLDER``."""
    (folder,), _ = named(given, Look(), "versions FOLDER")
    registry = open_registry(Path(folder))
    releases, played = registry.releases, registry.outcomes()
    table = Table("version", "stage", "episodes", "success")
    for version, stage in sorted(releases.stages.items()):
        total = sum(played.get(version, {}).values(), Outcomes())
        low, high = wilson(total.successes, total.episodes)
        rate = f"{total.successes / total.episodes:.0%} [{low:.0%}, {high:.0%}]" if total.episodes else ""
        table.add_row(str(version), stage, str(total.episodes), rate)
    Console(highlight=False).print(table)
    for robot, version in sorted(releases.pins.items()):
        _say(f"{'every robot' if robot == EVERY_ROBOT else robot} is pinned to version {version}")


def put(given: list[str]) -> None:
    """``vla-rl fleet publish FOLDER CHECKPOINT``."""
    (folder, checkpoint), options = named(given, Publish(), "publish FOLDER CHECKPOINT")
    from vla_rl.recipes.fleet.publishing import publish  # with torch

    registry = open_registry(Path(folder))
    version = publish(registry, signing_key(Path(folder), options.credentials), checkpoint, options.why)
    _say(f"policy version {version} is staged; next: vla-rl fleet try {folder} {version}, or promote")


def try_on(given: list[str]) -> None:
    """``vla-rl fleet try FOLDER VERSION [--robot NAME ...]``."""
    (folder, version), options = named(given, Try(), "try FOLDER VERSION")
    registry = open_registry(Path(folder))
    known = options.robot or {robot for robots in registry.outcomes().values() for robot in robots}
    chosen = registry.try_on(_number(version), known, user(), options.why)
    _say(f"policy version {version} is tried by {', '.join(chosen)}")


def promote(given: list[str]) -> None:
    """``vla-rl fleet promote FOLDER VERSION``."""
    (folder, version), options = named(given, Change(), "promote FOLDER VERSION")
    open_registry(Path(folder)).promote(_number(version), user(), options.why)
    _say(f"policy version {version} is active")


def roll_back(given: list[str]) -> None:
    """``vla-rl fleet rollback FOLDER``."""
    (folder,), options = named(given, Change(), "rollback FOLDER")
    active = open_registry(Path(folder)).roll_back(user(), options.why)
    _say(f"policy version {active} is active")


def pin(given: list[str]) -> None:
    """``vla-rl fleet pin FOLDER VERSION [--robot NAME]``."""
    (folder, version), options = named(given, Pin(), "pin FOLDER VERSION")
    open_registry(Path(folder)).pin(_number(version), user(), options.why, options.robot)
    _say(f"pinned to policy version {version}: {options.robot}")


def unpin(given: list[str]) -> None:
    """``vla-rl fleet unpin FOLDER [--robot NAME]``."""
    (folder,), options = named(given, Pin(), "unpin FOLDER")
    open_registry(Path(folder)).unpin(user(), options.why, options.robot)
    _say(f"not pinned any more: {options.robot}")


def named(given: list[str], options: Any, usage: str) -> tuple[list[str], Any]:
    """The positional arguments that ``usage`` names, and the options after them."""
    command, *names = usage.split()
    if given in (["-h"], ["--help"]):
        override(options, given, f"vla-rl fleet {usage}")
    if len(given) < len(names) or any(one.startswith("-") for one in given[: len(names)]):
        raise UserError(f"fleet {command} needs {' and '.join(names)}: vla-rl fleet {usage}.")
    return given[: len(names)], override(options, given[len(names) :], f"vla-rl fleet {usage}")


def _number(text: str) -> int:
    if not text.isdigit():
        raise UserError(f"{text!r} is no version of a policy, so nothing changes; vla-rl fleet versions lists them.")
    return int(text)


def _say(sentence: str) -> None:
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "versions": versions,
    "publish": put,
    "try": try_on,
    "promote": promote,
    "rollback": roll_back,
    "pin": pin,
    "unpin": unpin,
}
