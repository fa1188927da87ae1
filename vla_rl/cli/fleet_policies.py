"""``vla-rl fleet versions|publish|try|promote|rollback|pin|unpin FOLDER ...``: beside a running server, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError
from vla_rl.recipes.fleet.serving import for_each, number, open_registry, signing_key, table, user
from vla_rl.recipes.terminal import console


@dataclass(frozen=True)
class Change:
    """Choose which policy the robots run from their next episode on; the server may be running."""

    why: str = ""  # for the registry's history
    robot: tuple[str, ...] = ()  # of try: choose of these; of pin and unpin: these; none: all
    credentials: str = ""  # of publish: the folder with the signing key; "": FOLDER itself


def _versions(folder: str, options: Change) -> str:
    registry = open_registry(Path(folder))
    Console(highlight=False).print(table(registry))
    pins = registry.releases.pins.items()
    return "\n".join(f"{robot} is pinned to version {version}" for robot, version in sorted(pins)) or "none is pinned"


def _publish(folder: str, checkpoint: str, options: Change) -> str:
    from vla_rl.recipes.fleet.publishing import publish

    registry = open_registry(Path(folder))
    version = publish(registry, signing_key(Path(folder), options.credentials), checkpoint, options.why)
    return f"policy version {version} is staged; next: vla-rl fleet try {folder} {version}, or promote"


def _try(folder: str, version: str, options: Change) -> str:
    registry = open_registry(Path(folder))
    known = options.robot or {robot for robots in registry.outcomes().values() for robot in robots}
    return f"tried by {', '.join(registry.try_on(number(version), known, user(), options.why))}"


def _promote(folder: str, version: str, options: Change) -> str:
    open_registry(Path(folder)).promote(number(version), user(), options.why)
    return f"policy version {version} is active"


def _rollback(folder: str, options: Change) -> str:
    return f"policy version {open_registry(Path(folder)).roll_back(user(), options.why)} is active"


def _pin(folder: str, version: str, options: Change) -> str:
    return for_each(
        Path(folder), options.robot, lambda one, robot: one.pin(number(version), user(), options.why, robot)
    )


def _unpin(folder: str, options: Change) -> str:
    return for_each(Path(folder), options.robot, lambda one, robot: one.unpin(user(), options.why, robot))


def _run(do: Callable[..., str], usage: str, given: list[str]) -> None:
    """``do`` with the positional arguments that ``usage`` names and the options after them; print what it says."""
    command, *names = usage.split()
    if given in (["-h"], ["--help"]):
        override(Change(), given, f"vla-rl fleet {usage}")
    if len(given) < len(names) or any(one.startswith("-") for one in given[: len(names)]):
        raise UserError(f"fleet {command} needs {' and '.join(names)}: vla-rl fleet {usage}.")
    options = override(Change(), given[len(names) :], f"vla-rl fleet {usage}")
    console.print(do(*given[: len(names)], options), highlight=False, markup=False, soft_wrap=True)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    usage.split()[0]: partial(_run, do, usage)
    for do, usage in (
        (_versions, "versions FOLDER"),
        (_publish, "publish FOLDER CHECKPOINT"),
        (_try, "try FOLDER VERSION"),
        (_promote, "promote FOLDER VERSION"),
        (_rollback, "rollback FOLDER"),
        (_pin, "pin FOLDER VERSION"),
        (_unpin, "unpin FOLDER"),
    )
}
