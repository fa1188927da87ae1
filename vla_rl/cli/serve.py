"""``vla-rl serve FOLDER [--credentials FOLDER] ...``: the server of a fleet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.fleet.canary import CanaryRule
from vla_rl.fleet.identity import Revoked, load_credentials
from vla_rl.fleet.server import FleetServer, FleetServerConfig, log
from vla_rl.fleet.transport import TransportOptions
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.fleet.policies import key_file, signing_key
from vla_rl.recipes.progress import console
from vla_rl.recipes.signals import sigterm_like_ctrl_c

if TYPE_CHECKING:
    from vla_rl.recipes.fleet.learn import Learn

OF_LEARNER = "--learner."  # before the fields of --learn


@dataclass(frozen=True)
class Serve:
    """Take in what the robots of a fleet do: every record is on the disk of FOLDER before the robot hears so.

    A page on this machine shows robots, episodes, interventions and success.  After Ctrl-C or a power cut the same
    command goes on; robots keep what is not acknowledged and come back by themselves.  FOLDER/ledger holds the records:
    vla-rl fleet export makes a dataset of them.
    """

    policy: str = ""  # checkpoint or run that the fleet begins with; one that has a policy keeps it
    learn: str = ""  # FILE.py:function of a learner that runs beside the server; its fields are --learner.FIELD
    host: str = "127.0.0.1"  # the address to listen on
    port: int = 7790  # for robots; 0: any that is free
    page_port: int = 7791  # of the page, for this machine alone; 0: any that is free
    credentials: str = ""  # folder of the server's certificate, which vla-rl certs makes; needed for another host
    max_robots: int = 256
    memory_mb: int = 256  # for what robots have sent and the disk has not taken yet

    def __post_init__(self) -> None:
        """Raises UserError for numbers without meaning."""
        check_limits(self, port=(0, 65535), page_port=(0, 65535), max_robots=(1, 4096), memory_mb=(1, 1 << 20))


def serve(arguments: Sequence[str]) -> None:
    """Open the folder, listen, store."""
    given = list(arguments)
    if given in (["-h"], ["--help"]):
        override(Serve(), given, "vla-rl serve FOLDER")
    if not given or given[0].startswith("-"):
        raise UserError("serve needs the fleet's folder, for example vla-rl serve runs/fleet.")
    of_learner, rest = _split(given[1:])
    config: Serve = override(Serve(), rest, "vla-rl serve FOLDER")
    learn = _learner(config, of_learner)
    folder, identity = Path(given[0]), Path(config.credentials)
    credentials = load_credentials(identity, "server") if config.credentials else None
    revoked = Revoked(identity / "revoked.txt") if config.credentials else None
    transport = TransportOptions(config.host, config.port, config.max_robots, config.memory_mb)
    with sigterm_like_ctrl_c():
        try:
            options = FleetServerConfig(transport, config.page_port, learn.canary if learn else CanaryRule())
            with closing(FleetServer(folder, options, credentials, revoked)) as on:
                _print_log()
                console.print(f"robots connect to {config.host}:{on.transport.port}; the page is {on.page.url}")
                console.print(f"{folder} holds {on.ledger.position} records (Ctrl-C ends it)", highlight=False)
                _begin(on, folder, config, learn)
                threading.Event().wait()
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped serving; what robots were told is stored is on the disk.") from stop


def _begin(server: FleetServer, folder: Path, config: Serve, learn: Learn | None) -> None:
    key = signing_key(folder, config.credentials)
    policy = learn.policy if learn else config.policy
    if policy:
        from vla_rl.recipes.fleet.publishing import publish_first  # torch, which a server needs for nothing else

        console.print(publish_first(server.registry, key, policy), highlight=False, markup=False)
    if learn:
        from vla_rl.recipes.fleet.learn import LEARNER, command, prepare

        if aside := prepare(learn, folder, file_of(config.learn)):
            console.print(f"an earlier learner is now in {aside}", highlight=False)
        server.learn(command(folder, key_file(folder, config.credentials)))
        console.print(f"{config.learn} learns; its metrics are in {folder / LEARNER}", highlight=False)


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """The options of the learner, without their prefix, and the others."""
    ours: list[str] = []
    others: list[str] = []
    target = others
    for one in given:
        if one.startswith("--"):
            target = ours if one.startswith(OF_LEARNER) else others
        target.append(one.replace(OF_LEARNER, "--", 1))
    return ours, others


def _learner(config: Serve, options: list[str]) -> Learn | None:
    if not config.learn:
        if options:
            raise UserError(f"{options[0]!r} is of a learner and there is none; add --learn FILE.py:function.")
        return None
    from vla_rl.recipes.fleet.learn import Learn

    found = override(load_config(config.learn), options, f"vla-rl serve FOLDER --learn {config.learn}")
    if not isinstance(found, Learn):
        raise UserError(f"{config.learn} returns no Learn, so the server cannot run it; take one of configs/serve.py.")
    return replace(found, policy=config.policy) if config.policy else found


def _print_log() -> None:
    """Who comes, leaves and is refused, on standard error."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
