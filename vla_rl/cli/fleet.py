"""``vla-rl fleet``, ``serve`` and ``certs``: a fleet's policies and data, its server, and who may join it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vla_rl.cli.override import override, positional, subcommand, take_option
from vla_rl.cli.push import PushWhenDone
from vla_rl.contract.config import Checked, within
from vla_rl.contract.errors import UserError
from vla_rl.contract.hub import located
from vla_rl.fleet.identity import Authority, now
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.terminal import console, sigterm_like_ctrl_c, standard_output

if TYPE_CHECKING:
    from vla_rl.recipes.fleet import serving


USAGE = """vla-rl fleet simulate [FILE.py:function] [--out FOLDER] [--FIELD value ...]

Fleets of simulated robots, a scripted person and one learner in virtual time, with real control rates, delays and
failures; the same seed gives the same run.  FILE.py:function (default: fleet.py:hg_dagger) returns a Simulate.

  --robots 1 2 4     sizes of the fleets, one after the other
  --policy FOLDER    the checkpoint that all robots begin with; --demonstrations FOLDER, what it has imitated
  --times.sync 60    any number of the fleet, such as the seconds between two publications

demo: a whole fleet on this machine (--robots, --episodes, --updates-per-episode, --test, --page-port).  Of a real one:
export FOLDER; versions, publish, try, promote, rollback, pin, unpin FOLDER ... (--why, --robot, --credentials)."""
DEMO = """vla-rl fleet demo [FILE.py:function] [--out FOLDER] [--FIELD value ...]

A whole fleet on this machine: a policy is imitated, --robots simulated arms play --episodes each with a scripted person
beside them, a server stores what they do and shows it on a page, a learner imitates what people did, and robots take
its versions between episodes; then a page about it.  FILE.py:function (default: fleet.py:demo) returns it."""


def fleet(arguments: Sequence[str]) -> None:
    """Run one of the commands."""
    given = list(arguments)
    subcommand("fleet", ["simulate", "--help"] if given in ([], ["-h"], ["--help"]) else given, COMMANDS)


def _run_config(command: str, usage: str, config: str, given: list[str]) -> None:
    """``vla-rl fleet simulate | demo [FILE.py:function] [--out FOLDER] [--FIELD value ...]``."""
    if given in (["-h"], ["--help"]):
        print(usage, end="\n\n", flush=True)
    target, rest = (given[0], given[1:]) if given and not given[0].startswith("-") else (config, given)
    out, rest = take_option(rest, "--out", f"runs/fleet/{target.rpartition(':')[2]}")
    from vla_rl.recipes.recipe import run

    recipe = override(load_config(target), rest, f"vla-rl fleet {command} {target}")
    run(recipe, out, file_of(target), ["vla-rl", "fleet", command, *given])


@dataclass(frozen=True)
class Export(PushWhenDone):
    """Make a LeRobotDataset v3.0 of the whole episodes that the fleet of FOLDER has recorded.

    A dataset that is there is moved aside.  The server must not run meanwhile; after a crash it goes on as well as
    after Ctrl-C.
    """

    out: str = ""  # the dataset's folder; "": FOLDER/dataset


def export(given: list[str]) -> None:
    """``vla-rl fleet export FOLDER``."""
    usage = "fleet export FOLDER"
    (folder,), rest = positional(given, usage, Export(), "runs/fleet")
    config: Export = override(Export(), rest, f"vla-rl {usage}")
    from vla_rl.recipes.fleet import export as recipe

    out = Path(config.out or Path(folder, "dataset"))
    summary = recipe.export(Path(folder), out, console.print)
    console.print(f"{summary}: {out}", highlight=False)
    config.push_dataset(out, ["vla-rl", "fleet", "export", *given])


@dataclass(frozen=True)
class Change:
    """Choose which policy the robots run from their next episode on; the server may be running."""

    why: str = ""  # for the registry's history
    robot: tuple[str, ...] = ()  # of try: choose of these; of pin and unpin: these; none: all
    credentials: str = ""  # of publish: the folder with the signing key; "": FOLDER itself


def _change(usage: str, given: list[str]) -> None:
    """Do what ``usage`` begins with to the registry of the folder that it names, and say what was done."""
    (folder, *named), rest = positional(given, f"fleet {usage}", Change())
    options = override(Change(), rest, f"vla-rl fleet {usage}")
    from vla_rl.fleet.releases import EVERY_ROBOT
    from vla_rl.recipes.fleet import serving

    registry, by, robots = serving.open_registry(Path(folder)), (serving.user(), options.why), options.robot
    version, said = serving.number(named[0]) if "VERSION" in usage else 0, f"{', '.join(robots) or 'every robot'}: done"
    match usage.split()[0]:
        case "versions":
            standard_output().print(serving.table(registry))
            pins = sorted(registry.releases.pins.items())
            said = "\n".join(f"{robot} is pinned to version {pinned}" for robot, pinned in pins) or "none is pinned"
        case "publish":
            from vla_rl.recipes.fleet.publishing import publish

            key = serving.signing_key(Path(folder), options.credentials)
            version = publish(registry, key, located(named[0]), options.why)
            said = f"policy version {version} is staged; next: vla-rl fleet try {folder} {version}, or promote"
        case "try":
            known = robots or {robot for played in registry.outcomes().values() for robot in played}
            said = f"tried by {', '.join(registry.try_on(version, known, *by))}"
        case "promote":
            registry.promote(version, *by)
            said = f"policy version {version} is active"
        case "rollback":
            said = f"policy version {registry.roll_back(*by)} is active"
        case "pin":
            for robot in robots or (EVERY_ROBOT,):
                registry.pin(version, *by, robot)
        case "unpin":
            for robot in robots or (EVERY_ROBOT,):
                registry.unpin(*by, robot)
    console.print(said, highlight=False, markup=False, soft_wrap=True)


_CHANGES = (
    *("versions FOLDER", "publish FOLDER CHECKPOINT", "try FOLDER VERSION", "promote FOLDER VERSION"),
    *("rollback FOLDER", "pin FOLDER VERSION", "unpin FOLDER"),
)
COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "simulate": partial(_run_config, "simulate", USAGE, "fleet.py:hg_dagger"),
    "demo": partial(_run_config, "demo", DEMO, "fleet.py:demo"),
    "export": export,
    **{usage.split()[0]: partial(_change, usage) for usage in _CHANGES},
}


# -- the server --------------------------------------------------------------------------------------------------------

OF_LEARNER = "--learner."  # before the fields of --learn


@dataclass(frozen=True)
class Serve(Checked):
    """Take in what the robots of a fleet do: every record is on the disk of FOLDER before the robot hears so.

    A page on this machine shows robots, episodes, interventions and success.  After Ctrl-C or a power cut the same
    command goes on; robots keep what is not acknowledged and come back by themselves.  FOLDER/ledger holds the records:
    vla-rl fleet export makes a dataset of them, and with --learn a learner beside the server learns from them.
    """

    policy: str = ""  # checkpoint or run that the fleet begins with; one that has a policy keeps it
    learn: str = ""  # FILE.py:function of a learner that runs beside the server; its fields are --learner.FIELD
    host: str = "127.0.0.1"  # the address to listen on
    port: int = within(7790, 0, 65535)  # for robots; 0: any that is free
    page_port: int = within(7791, 0, 65535)  # of the page, for this machine alone; 0: any that is free
    credentials: str = ""  # folder of the server's certificate, which vla-rl certs makes; needed for another host
    max_robots: int = within(256, 1, 4096)
    memory_mb: int = within(256, 1, 1 << 20)  # for what robots have sent and the disk has not taken yet


def serve(arguments: Sequence[str]) -> None:
    """Open the folder, listen, store."""
    from vla_rl.fleet.server import FleetServerConfig
    from vla_rl.fleet.transport import TransportOptions
    from vla_rl.recipes.fleet import serving

    (folder,), rest = positional(arguments, "serve FOLDER", Serve(), "runs/fleet")
    of_learner, rest = _split(rest)
    config: Serve = override(Serve(), rest, "vla-rl serve FOLDER")
    transport = TransportOptions(config.host, config.port, config.max_robots, config.memory_mb)
    options, beginning = FleetServerConfig(transport, config.page_port), _beginning(config, of_learner)
    with sigterm_like_ctrl_c():
        try:
            serving.serve(Path(folder), options, config.credentials, beginning, console)
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
    from vla_rl.recipes.fleet import serving

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


# -- certificates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certs:
    """Certificates of a fleet: its server and its robots know each other by them, across any network.

    init FOLDER [--host ADDRESS ...] [--days N] makes an authority and the server's credentials, server FOLDER makes
    those anew; robot FOLDER NAME [--days N] makes a robot's; revoke FOLDER NAME refuses that robot from now on; list
    FOLDER prints all with their dates.
    """


@dataclass(frozen=True)
class ServerCertificate(Checked):
    """Make the credentials of the server, which go to its machine as the folder FOLDER/server."""

    host: tuple[str, ...] = ()  # names and addresses by which robots reach the server; this machine's own always
    days: int = within(365, 1, 3650)  # how long the server's certificate is valid


@dataclass(frozen=True)
class RobotCertificate(Checked):
    """Make the credentials of a robot, which go to its computer as the folder FOLDER/robots/NAME."""

    days: int = within(365, 1, 3650)  # how long its certificate is valid


def certs(arguments: Sequence[str]) -> None:
    """Run one of the commands."""
    given = list(arguments)
    if given[:1] in (["-h"], ["--help"]):
        override(Certs(), given, "vla-rl certs")
    subcommand("certs", given, CERTS)


def _certificates(usage: str, given: list[str]) -> None:
    """Do what ``usage`` begins with to the authority of the folder that it names, and say what was done."""
    (folder, *names), rest = positional(given, f"certs {usage}", _CERTS[usage])
    options = override(_CERTS[usage], rest, f"vla-rl certs {usage}")
    match usage.split()[0]:
        case "init":
            (issued,) = Authority.create(Path(folder), options.host, options.days).issued()
            said = (
                f"{folder}/server goes to the server's machine; its certificate is valid until "
                f"{issued.expires:%Y-%m-%d}.\n{folder}/authority stays here: whoever has it can make robots.  Next: "
                f"vla-rl certs robot {folder} NAME"
            )
        case "server":
            made = Authority(Path(folder)).server(options.host, options.days)
            until = Authority(Path(folder)).issued()[-1].expires
            said = f"{made} goes to the server's machine; it is valid until {until:%Y-%m-%d}."
        case "robot":
            made = Authority(Path(folder)).robot(names[0], options.days)
            until = Authority(Path(folder)).issued()[-1].expires
            said = f"{made} goes to robot {names[0]}; it is valid until {until:%Y-%m-%d}."
        case "revoke":
            count = Authority(Path(folder)).revoke(names[0])
            said = (
                f"{count} certificate(s) of {names[0]} revoked in {folder}/server/revoked.txt; a server that runs on a "
                "copy of the folder refuses them once it has that file."
            )
        case _:
            return _list(Authority(Path(folder)))
    console.print(said, highlight=False)


def _list(authority: Authority) -> None:
    table = Table("role", "name", "valid until", "state")
    for one in authority.issued():
        state = "revoked" if one.revoked else "expired" if one.expires <= now() else "valid"
        table.add_row(one.role, one.name, f"{one.expires:%Y-%m-%d}", state)
    standard_output().print(table)


_CERTS: dict[str, Any] = {
    **dict.fromkeys(("init FOLDER", "server FOLDER"), ServerCertificate()),
    "robot FOLDER NAME": RobotCertificate(),
    **dict.fromkeys(("revoke FOLDER NAME", "list FOLDER"), Certs()),
}
CERTS: dict[str, Callable[[list[str]], None]] = {usage.split()[0]: partial(_certificates, usage) for usage in _CERTS}
