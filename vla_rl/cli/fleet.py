"""``vla-rl fleet simulate [FILE.py:function] [options]`` and ``COMMAND FOLDER``: commands about a fleet of robots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.cli.override import override
from vla_rl.cli.train import take_option
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.contract.load import load
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.progress import console
from vla_rl.recipes.recipe import run

USAGE = """vla-rl fleet simulate [FILE.py:function] [--out FOLDER] [--FIELD value ...]

Fleets of simulated robots, a scripted person and one learner in virtual time, with real control rates, delays and
failures; the same seed gives the same run.  FILE.py:function (default: fleet.py:hg_dagger) returns a Simulate.

  --robots 1 2 4     sizes of the fleets, one after the other
  --policy FOLDER    the checkpoint that all robots begin with; --demonstrations FOLDER, what it has imitated
  --times.sync 60    any number of the fleet, such as the seconds between two publications

Of a real fleet: export FOLDER; versions, publish, try, promote, rollback, pin and unpin FOLDER ... choose its policies
with --why, --robot and --credentials (--help of each explains it)."""
EXPORT = """vla-rl fleet export FOLDER [--out DATASET]

The whole episodes that the fleet of FOLDER has recorded, as a LeRobotDataset v3.0 (default: FOLDER/dataset).  A dataset
that is there is moved aside.  The server must not run meanwhile; after a crash it goes on as well as after Ctrl-C."""
CONFIG = "fleet.py:hg_dagger"


def fleet(arguments: Sequence[str]) -> None:
    """Run one of the commands."""
    given = list(arguments)
    if given in ([], ["-h"], ["--help"]):
        simulate(["--help"])
    commands = COMMANDS if given[0] in COMMANDS else COMMANDS | load("vla_rl.cli.fleet_policies:COMMANDS")  # with gRPC
    if given[0] not in commands:
        raise UserError(f"fleet has no command {given[0]!r}; {did_you_mean(given[0], commands)}")
    commands[given[0]](given[1:])


def simulate(given: list[str]) -> None:
    """``vla-rl fleet simulate [FILE.py:function] [--out FOLDER] [--FIELD value ...]``."""
    if given in (["-h"], ["--help"]):
        print(USAGE, end="\n\n", flush=True)
    target, rest = (given[0], given[1:]) if given and not given[0].startswith("-") else (CONFIG, given)
    out, rest = take_option(rest, "--out", f"runs/fleet/{target.rpartition(':')[2]}")
    recipe = override(load_config(target), rest, f"vla-rl fleet simulate {target}")
    summary = run(recipe, out, file_of(target))
    for robots, found in summary["fleets"].items():
        console.print(
            f"{robots} robots: {summary['before']['success']:.1%} -> {found['test']['success']:.1%} on test seeds, a "
            f"person in {found['share']:.1%} of the steps",
            highlight=False,
        )


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


COMMANDS = {"simulate": simulate, "export": export}
