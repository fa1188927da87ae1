"""``vla-rl sims [install NAME | serve NAME] ...``: simulators in installations of their own and on other machines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.recipes import sims as simulators
from vla_rl.recipes.terminal import console

_TO_DO = {"missing": "install", "unfinished": "finish", "outdated": "renew"}


@dataclass(frozen=True)
class Sims:
    """Simulators that have a virtual environment of their own, what state it is in and what to do about it.

    install NAME [--requirements FILE] [--python PYTHON] makes one.
    serve NAME [--port PORT] [--host HOST] [--key FILE] [--certificate FILE] [--private-key FILE] lets learners on other
    machines use an environment of this one.
    """


@dataclass(frozen=True)
class Serve:
    """Serve an environment to learners on other machines (environment "remote"), until Ctrl-C.

    Only this machine can connect, unless a certificate and a key file are given.
    """

    port: int = 7777  # 0: a free one
    host: str = "127.0.0.1"  # the address to listen on
    key: str = ""  # a file with the secret that clients have to know
    certificate: str = ""  # PEM file of this server's certificate
    private_key: str = ""  # PEM file of its private key


@dataclass(frozen=True)
class Install:
    """Make the virtual environment of a simulator; one that is complete is left alone, any other is made anew."""

    requirements: str = ""  # a pip file, for a simulator that is not ours
    python: str = sys.executable  # the interpreter of the virtual environment


def sims(arguments: Sequence[str]) -> None:
    """Run one of the commands, or print the table."""
    given = list(arguments)
    if given and not given[0].startswith("-"):
        if given[0] not in COMMANDS:
            raise UserError(f"sims has no command {given[0]!r}; {did_you_mean(given[0], COMMANDS)}")
        COMMANDS[given[0]](given[1:])
        return
    override(Sims(), given, "vla-rl sims")
    Console(highlight=False).print(_table())


def install(arguments: Sequence[str]) -> None:
    """``vla-rl sims install NAME [--requirements FILE] [--python PYTHON]``."""
    given = list(arguments)
    if given in (["-h"], ["--help"]):
        override(Install(), given, "vla-rl sims install NAME")
    if not given or given[0].startswith("-"):
        raise UserError("sims install needs a simulator, for example vla-rl sims install metaworld.")
    options: Install = override(Install(), given[1:], "vla-rl sims install NAME")
    requirements = Path(options.requirements) if options.requirements else None
    with console.status(f"installing {given[0]}") as status:
        try:
            made = simulators.installations().install(
                given[0], lambda line: status.update(f"{given[0]}: {line[:100]}"), requirements, options.python
            )
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(
                f"stopped; {given[0]} is half installed and will not be used until 'vla-rl sims install {given[0]}' "
                "has finished it."
            ) from stop
    console.print(f"{made.name} is installed in {made.folder}; its exact packages are in {made.lock}.")
    for path, source in made.missing_files().items():
        console.print(f"  {path} is missing: {source}.")


def serve(arguments: Sequence[str]) -> None:
    """``vla-rl sims serve NAME [--port PORT] [--host HOST --key FILE --certificate FILE --private-key FILE]``."""
    given = list(arguments)
    if given in (["-h"], ["--help"]):
        override(Serve(), given, "vla-rl sims serve NAME")
    if not given or given[0].startswith("-"):
        raise UserError("sims serve needs an environment, for example vla-rl sims serve lift.")
    options: Serve = override(Serve(), given[1:], "vla-rl sims serve NAME")
    security = (options.key, options.certificate, options.private_key)
    with closing(simulators.env_server(given[0], options.port, options.host, *security)) as server:
        console.print(f"{given[0]} is served on {options.host}:{server.port}; Ctrl-C ends it.", highlight=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.close())
        server.run()


def _table() -> Table:
    table = Table("simulator", "state", "version", Column("", overflow="fold"))
    for one in simulators.installations().known():
        state = one.state()
        lacking = [f"{path} is missing: {source}" for path, source in one.missing_files().items()]
        command = f"vla-rl sims install {one.name}"
        table.add_row(
            one.name,
            "without files" if state == "ready" and lacking else state,
            one.version(),
            "; ".join(lacking) or str(one.folder) if state == "ready" else f"{_TO_DO[state]} it: {command}",
        )
    return table


COMMANDS = {"install": install, "serve": serve}
