"""``vla-rl serve FOLDER [--credentials FOLDER] ...``: the server of a fleet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError
from vla_rl.contract.limits import check_limits
from vla_rl.fleet.identity import Revoked, load_credentials
from vla_rl.fleet.server import FleetServer, FleetServerConfig, log
from vla_rl.fleet.transport import TransportOptions
from vla_rl.recipes.fleet.policies import signing_key
from vla_rl.recipes.progress import console
from vla_rl.recipes.signals import sigterm_like_ctrl_c


@dataclass(frozen=True)
class Serve:
    """Take in what the robots of a fleet do: every record is on the disk of FOLDER before the robot hears so.

    A page on this machine shows robots, episodes, interventions and success.  After Ctrl-C or a power cut the same
    command goes on; robots keep what is not acknowledged and come back by themselves.  FOLDER/ledger holds the records:
    vla-rl fleet export makes a dataset of them.
    """

    policy: str = ""  # checkpoint or run that the fleet begins with; one that has a policy keeps it
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
    config: Serve = override(Serve(), given[1:], "vla-rl serve FOLDER")
    folder, identity = Path(given[0]), Path(config.credentials)
    credentials = load_credentials(identity, "server") if config.credentials else None
    revoked = Revoked(identity / "revoked.txt") if config.credentials else None
    transport = TransportOptions(config.host, config.port, config.max_robots, config.memory_mb)
    with sigterm_like_ctrl_c():
        try:
            with closing(
                FleetServer(folder, FleetServerConfig(transport, config.page_port), credentials, revoked)
            ) as on:
                _print_log()
                console.print(f"robots connect to {config.host}:{on.transport.port}; the page is {on.page.url}")
                console.print(f"{folder} holds {on.ledger.position} records (Ctrl-C ends it)", highlight=False)
                _begin(on, folder, config)
                threading.Event().wait()
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped serving; what robots were told is stored is on the disk.") from stop


def _begin(server: FleetServer, folder: Path, config: Serve) -> None:
    key = signing_key(folder, config.credentials)
    if config.policy:
        from vla_rl.recipes.fleet.publishing import publish_first  # torch, which a server needs for nothing else

        console.print(publish_first(server.registry, key, config.policy), highlight=False, markup=False)


def _print_log() -> None:
    """Who comes, leaves and is refused, on standard error."""
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())
