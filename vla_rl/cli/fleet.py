"""``vla-rl fleet simulate [FILE.py:function] [options]``: commands about a fleet of robots."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.cli.override import override
from vla_rl.cli.train import take_option
from vla_rl.contract.errors import UserError, did_you_mean
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.progress import console
from vla_rl.recipes.recipe import run

USAGE = """vla-rl fleet simulate [FILE.py:function] [--out FOLDER] [--FIELD value ...]

Fleets of simulated robots, a scripted person and one learner in virtual time, with real control rates, delays and
failures; the same seed gives the same run.  FILE.py:function (default: fleet.py:hg_dagger) returns a Simulate.

  --robots 1 2 4     sizes of the fleets, one after the other
  --policy FOLDER    the checkpoint that all robots begin with; --demonstrations FOLDER, what it has imitated
  --times.sync 60    any number of the fleet, such as the seconds between two publications"""
CONFIG = "fleet.py:hg_dagger"


def fleet(arguments: Sequence[str]) -> None:
    """Run one of the commands."""
    given = list(arguments)
    if given in ([], ["-h"], ["--help"]):
        simulate(["--help"])
    if given[0] not in COMMANDS:
        raise UserError(f"fleet has no command {given[0]!r}; {did_you_mean(given[0], COMMANDS)}")
    COMMANDS[given[0]](given[1:])


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


COMMANDS = {"simulate": simulate}
