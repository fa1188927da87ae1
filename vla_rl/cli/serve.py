"""``vla-rl serve FOLDER [--learn FILE.py:function] [--credentials FOLDER] ...``: the server of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vla_rl.cli.override import override
from vla_rl.contract.config import check_limits
from vla_rl.contract.errors import UserError
from vla_rl.fleet.server import FleetServerConfig
from vla_rl.fleet.transport import TransportOptions
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.fleet import serving
from vla_rl.recipes.terminal import console, sigterm_like_ctrl_c

OF_LEARNER = "--learner."  # before the fields of --learn


@dataclass(frozen=True)
class Serve:
    """Take in what the robots of a fleet do: every record is on the disk of FOLDER before the robot hears so.

    A page on this machine shows robots, episodes, interventions and success.  After Ctrl-C or a power cut the same
    command goes on; robots keep what is not acknowledged and come back by themselves.  FOLDER/ledger holds the records:
    vla-rl fleet export makes a dataset of them, and with --learn a learner beside the server learns from them.
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
    transport = TransportOptions(config.host, config.port, config.max_robots, config.memory_mb)
    options, beginning = FleetServerConfig(transport, config.page_port), _beginning(config, of_learner)
    with sigterm_like_ctrl_c():
        try:
            serving.serve(Path(given[0]), options, config.credentials, beginning, console)
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped serving; what robots were told is stored is on the disk.") from stop


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """The options of the learner, without their prefix, and the others."""
    ours, others = list[str](), list[str]()
    target = others
    for one in given:
        if one.startswith("--"):
            target = ours if one.startswith(OF_LEARNER) else others
        target.append(one.replace(OF_LEARNER, "--", 1))
    return ours, others


def _beginning(config: Serve, of_learner: list[str]) -> serving.Beginning:
    if not config.learn:
        if of_learner:
            raise UserError(f"{of_learner[0]!r} is of a learner and there is none; add --learn FILE.py:function.")
        return serving.Beginning(config.policy)
    from vla_rl.recipes.fleet.learners import Learn

    found = override(load_config(config.learn), of_learner, f"vla-rl serve FOLDER --learn {config.learn}")
    if not isinstance(found, Learn):
        raise UserError(f"{config.learn} returns no Learn, so the server cannot run it; take one of configs/fleet.py.")
    learn = replace(found, policy=config.policy) if config.policy else found
    return serving.Beginning(learn.policy, learn, file_of(config.learn))
