"""``vla-rl train FILE.py:function [--out FOLDER] [--seeds N] [--field value ...]``, ``vla-rl train --resume FOLDER``"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.cli.override import override
from vla_rl.contract.errors import UserError
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.progress import console
from vla_rl.recipes.seeds import train_seeds
from vla_rl.recipes.signals import sigterm_like_ctrl_c
from vla_rl.training.distributed import barrier, torchrun_processes
from vla_rl.training.tracking import RunFolder


def train(arguments: Sequence[str]) -> None:
    """Run the recipe that a config function returns, or go on with a run that was stopped."""
    stopped, others = take_option(list(arguments), "--resume", "")
    if stopped:
        if others:
            raise UserError(
                f"a resumed run has the config it began with, so {others[0]!r} cannot change it; leave it out."
            )
        if "WORLD_SIZE" in os.environ:
            raise UserError(
                "a run of several processes saves no state, so it cannot go on; start one from its best checkpoint."
            )
        run_in(RunFolder.resume(stopped))
        return
    if not arguments or arguments[0].startswith("-"):
        raise UserError("train needs a config, so it knows what to run; write vla-rl train FILE.py:function.")
    out, rest = take_option(list(arguments[1:]), "--out", f"runs/{arguments[0].rpartition(':')[2]}")
    seeds, rest = take_option(rest, "--seeds", "")
    if seeds:
        processes, rest = take_option(rest, "--processes", "2")
        override(load_config(arguments[0]), rest, f"vla-rl train {arguments[0]}")  # a mistake is told before any run
        train_seeds(arguments[0], _count("--seeds", seeds), Path(out), rest, _count("--processes", processes))
        return
    run(override(load_config(arguments[0]), rest, f"vla-rl train {arguments[0]}"), out)


def _count(name: str, given: str) -> int:
    if not given.isdigit():
        raise UserError(f"{name} {given!r} is no number, so nothing was run; write for example {name} 3.")
    return int(given)


def run(recipe: Any, out: str) -> dict[str, Any]:
    """Run ``recipe`` in the folder ``out`` and write its summary; torchrun's further processes have folders in it."""
    with torchrun_processes() as group:
        if group.rank == 0:
            folder = RunFolder(out, recipe)
            if folder.moved_to:
                console.print(f"an earlier run was in {out}; it is now {folder.moved_to}.")
        barrier(group)
        if group.rank:
            folder = RunFolder(f"{out}/process-{group.rank}", recipe, tracked=False)
        return run_in(folder)


def run_in(folder: RunFolder) -> dict[str, Any]:
    """Run, or go on with, the recipe of ``folder``.

    Ctrl-C and SIGTERM are raised again with a sentence that says how to go on.
    """
    try:
        with sigterm_like_ctrl_c():
            summary: dict[str, Any] = folder.config.run(folder)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; go on with: vla-rl train --resume {folder.path}") from stop
    finally:
        folder.close()
    folder.write_summary(summary)
    console.print(f"done: {folder.path}")
    return summary


def take_option(arguments: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """The value of ``name VALUE`` or ``name=VALUE`` and the other arguments."""
    for i, argument in enumerate(arguments):
        if argument.startswith(name + "="):
            return argument.partition("=")[2], arguments[:i] + arguments[i + 1 :]
        if argument == name:
            if i + 1 == len(arguments):
                raise UserError(f"{name} needs a value, for example {name} {default}.")
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
    return default, arguments
