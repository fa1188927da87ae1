"""``vla-rl certs init|server|robot|revoke|list FOLDER ...``: who may join a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vla_rl.cli.override import override
from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.fleet.identity import Authority, now
from vla_rl.recipes.terminal import console


@dataclass(frozen=True)
class Certs:
    """Certificates of a fleet: its server and its robots know each other by them, across any network.

    init FOLDER [--host ADDRESS ...] [--days N] makes an authority and the server's credentials, server FOLDER makes
    those anew; robot FOLDER NAME [--days N] makes a robot's; revoke FOLDER NAME refuses that robot from now on; list
    FOLDER prints all with their dates.
    """


@dataclass(frozen=True)
class Server:
    """Make the credentials of the server, which go to its machine as the folder FOLDER/server."""

    host: tuple[str, ...] = ()  # names and addresses by which robots reach the server; this machine's own always
    days: int = 365  # how long the server's certificate is valid

    def __post_init__(self) -> None:
        """Raises UserError for days without meaning."""
        check_limits(self, days=(1, 3650))


@dataclass(frozen=True)
class Robot:
    """Make the credentials of a robot, which go to its computer as the folder FOLDER/robots/NAME."""

    days: int = 365  # how long its certificate is valid

    def __post_init__(self) -> None:
        """Raises UserError for days without meaning."""
        check_limits(self, days=(1, 3650))


def certs(arguments: Sequence[str]) -> None:
    """Run one of the commands."""
    given = list(arguments)
    if not given or given[0].startswith("-"):
        override(Certs(), given, "vla-rl certs")
        raise UserError(f"certs needs a command: {', '.join(COMMANDS)}; vla-rl certs --help explains them.")
    if given[0] not in COMMANDS:
        raise UserError(f"certs has no command {given[0]!r}; {did_you_mean(given[0], COMMANDS)}")
    COMMANDS[given[0]](given[1:])


def init(given: list[str]) -> None:
    """``vla-rl certs init FOLDER [--host ADDRESS ...] [--days N]``."""
    (folder,), options = _named(given, Server(), "init FOLDER")
    made = Authority.create(Path(folder), options.host, options.days)
    (issued,) = made.issued()
    console.print(
        f"{folder}/server goes to the server's machine; its certificate is valid until {issued.expires:%Y-%m-%d}.\n"
        f"{folder}/authority stays here: whoever has it can make robots.  Next: vla-rl certs robot {folder} NAME",
        highlight=False,
    )


def server(given: list[str]) -> None:
    """``vla-rl certs server FOLDER [--host ADDRESS ...] [--days N]``: a new certificate, when the old one ends."""
    (folder,), options = _named(given, Server(), "server FOLDER")
    authority = Authority(Path(folder))
    made, issued = authority.server(options.host, options.days), authority.issued()[-1]
    console.print(f"{made} goes to the server's machine; it is valid until {issued.expires:%Y-%m-%d}.", highlight=False)


def robot(given: list[str]) -> None:
    """``vla-rl certs robot FOLDER NAME [--days N]``."""
    (folder, name), options = _named(given, Robot(), "robot FOLDER NAME")
    authority = Authority(Path(folder))
    made, issued = authority.robot(name, options.days), authority.issued()[-1]
    console.print(f"{made} goes to robot {name}; it is valid until {issued.expires:%Y-%m-%d}.", highlight=False)


def revoke(given: list[str]) -> None:
    """``vla-rl certs revoke FOLDER NAME``."""
    (folder, name), _ = _named(given, Certs(), "revoke FOLDER NAME")
    count = Authority(Path(folder)).revoke(name)
    console.print(
        f"{count} certificate(s) of {name} revoked in {folder}/server/revoked.txt; a server that runs on a copy of the "
        "folder refuses them once it has that file.",
        highlight=False,
    )


def list_certs(given: list[str]) -> None:
    """``vla-rl certs list FOLDER``."""
    (folder,), _ = _named(given, Certs(), "list FOLDER")
    table = Table("role", "name", "valid until", "state")
    for one in Authority(Path(folder)).issued():
        state = "revoked" if one.revoked else "expired" if one.expires <= now() else "valid"
        table.add_row(one.role, one.name, f"{one.expires:%Y-%m-%d}", state)
    Console(highlight=False).print(table)


def _named(given: list[str], options: Any, usage: str) -> tuple[list[str], Any]:
    """The positional arguments that ``usage`` names, and the options after them."""
    count = len(usage.split()) - 1
    if given in (["-h"], ["--help"]):
        override(options, given, f"vla-rl certs {usage}")
    if len(given) < count or any(one.startswith("-") for one in given[:count]):
        raise UserError(f"certs {usage.split()[0]} needs {' and '.join(usage.split()[1:])}: vla-rl certs {usage}.")
    return given[:count], override(options, given[count:], f"vla-rl certs {usage}")


COMMANDS = {"init": init, "server": server, "robot": robot, "revoke": revoke, "list": list_certs}
