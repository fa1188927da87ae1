"""``vla-rl fleet simulate | demo [FILE.py:function] [options]`` and ``COMMAND FOLDER``: about a fleet of robots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from vla_rl.cli.override import override, take_option
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.recipe import run
from vla_rl.recipes.terminal import console

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
EXPORT = """vla-rl fleet export FOLDER [--out DATASET]

The whole episodes that the fleet of FOLDER has recorded, as a LeRobotDataset v3.0 (default: FOLDER/dataset).  A dataset
that is there is moved aside.  The server must not run meanwhile; after a crash it goes on as well as after Ctrl-C."""


def fleet(arguments: Sequence[str]) -> None:
    """Run one of the commands."""
    given = list(arguments)
    if given in ([], ["-h"], ["--help"]):
        COMMANDS["simulate"](["--help"])
    commands = COMMANDS if given[0] in COMMANDS else COMMANDS | load("vla_rl.cli.fleet_policies:COMMANDS")  # with gRPC
    if given[0] not in commands:
        raise UserError(f"fleet has no command {given[0]!r}; {did_you_mean(given[0], commands)}")
    commands[given[0]](given[1:])


def _run(command: str, usage: str, config: str, given: list[str]) -> None:
    """``vla-rl fleet simulate | demo [FILE.py:function] [--out FOLDER] [--FIELD value ...]``."""
    if given in (["-h"], ["--help"]):
        print(usage, end="\n\n", flush=True)
    target, rest = (given[0], given[1:]) if given and not given[0].startswith("-") else (config, given)
    out, rest = take_option(rest, "--out", f"runs/fleet/{target.rpartition(':')[2]}")
    run(override(load_config(target), rest, f"vla-rl fleet {command} {target}"), out, file_of(target))


def export(given: list[str]) -> None:
    """``vla-rl fleet export FOLDER [--out DATASET]``."""
    if given in ([], ["-h"], ["--help"]) or given[0].startswith("-"):
        print(EXPORT)
        if given in (["-h"], ["--help"]):
            return
        raise UserError("fleet export needs the fleet's folder, for example vla-rl fleet export runs/fleet.")
    from vla_rl.recipes.fleet import export as recipe

    folder = Path(given[0])
    out, rest = take_option(given[1:], "--out", str(folder / "dataset"))
    if rest:
        raise UserError(f"fleet export has no option {rest[0]!r}; it takes --out DATASET.")
    summary = recipe.export(folder, Path(out), console.print)
    console.print(f"{summary}: {out}", highlight=False)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "simulate": partial(_run, "simulate", USAGE, "fleet.py:hg_dagger"),
    "demo": partial(_run, "demo", DEMO, "fleet.py:demo"),
    "export": export,
}
