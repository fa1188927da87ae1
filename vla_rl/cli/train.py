"""``vla-rl train FILE.py:function [--out FOLDER] [--seeds N] [--field value ...]``, ``vla-rl train --resume FOLDER``"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.cli.override import override, take_option
from vla_rl.contract.errors import UserError
from vla_rl.recipes.config_files import file_of, load_config
from vla_rl.recipes.recipe import resume, run
from vla_rl.recipes.sweep import train_seeds
from vla_rl.recipes.workers import new_engine, on_engine

USAGE = """vla-rl train FILE.py:function [options] [--field value ...]
vla-rl train --resume RUN

Run the config that the function returns.  FILE.py is a path, or the name of a config that vla-rl ships.

  --out FOLDER       the run folder (default: runs/FUNCTION); an earlier run there is moved aside
  --seeds N          train on the seeds 1 to N in OUT/seed-1 ... with one table; {seed} in a value is the seed
  --processes P      with --seeds: how many run at a time (default: 2)
  --resume RUN       go on with a run that was stopped, with the config that it began with; a finished one goes on to
                     a larger --rl.loop.iterations or --rl.loop.env-steps
  --sources N        collect in N processes (short for --rl.loop.collectors)
  --staleness K      which play on while the policy learns, at most K updates ahead (--rl.loop.staleness)
  --engine ray       start those processes, and those that evaluate, in a Ray cluster (default: local);
                     with --seeds: the runs themselves, on machines that share the disk
  --address ADDRESS  HOST:PORT of its head node (default: RAY_ADDRESS, or a new one on this machine)
  --gpus G           that each of them takes there (default: 0)
  --env NAME         environment of the catalogue, or package.module:make (short for --env.name)
  --field value      any field of the config, nested ones with dots (--rl.algorithm.gamma 0.98)

vla-rl train FILE.py:function --help lists the fields of that config, vla-rl inspect FILE.py:function their values."""


def train(arguments: Sequence[str]) -> None:
    """Run the recipe that a config function returns, or go on with a run that was stopped."""
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE)
        return
    engine, rest = take_option(list(arguments), "--engine", "local")
    address, rest = take_option(rest, "--address", "")
    gpus, rest = take_option(rest, "--gpus", "0")
    stopped, others = take_option(rest, "--resume", "")
    with on_engine(new_engine(engine, address, _number("--gpus", gpus))):
        if stopped:
            _resume(stopped, others)
        else:
            _begin(others)


def _begin(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        raise UserError("train needs a config, so it knows what to run; write vla-rl train FILE.py:function.")
    target = arguments[0]
    out, rest = take_option(arguments[1:], "--out", f"runs/{target.rpartition(':')[2]}")
    seeds, rest = take_option(rest, "--seeds", "")
    if {"-h", "--help"} & set(rest):
        print(USAGE, end="\n\n", flush=True)
    processes = "2"
    if seeds:
        processes, rest = take_option(rest, "--processes", processes)
    recipe = override(load_config(target), rest, f"vla-rl train {target}")  # a mistake is said before any run starts
    if seeds:
        train_seeds(target, _count("--seeds", seeds), Path(out), rest, _count("--processes", processes))
        return
    run(recipe, out, file_of(target))


def _resume(stopped: str, others: Sequence[str]) -> None:
    resume(stopped, lambda config: override(config, others, f"vla-rl train --resume {stopped}") if others else config)


def _number(name: str, given: str) -> float:
    try:
        return float(given)
    except ValueError as error:
        raise UserError(f"{name} {given!r} is no number, so nothing was run; write for example {name} 1.") from error


def _count(name: str, given: str) -> int:
    if not given.isdigit():
        raise UserError(f"{name} {given!r} is no number, so nothing was run; write for example {name} 3.")
    return int(given)
