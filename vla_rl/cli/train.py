"""``vla-rl train FILE.py:function [--out FOLDER] [--field value ...]``"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vla_rl.cli.configs import load_config, override
from vla_rl.cli.progress import console
from vla_rl.contract.errors import UserError
from vla_rl.training.tracking import RunFolder

RESUME = "configs/demo.py:last_step"  # reinforcement learning from any checkpoint


def train(arguments: Sequence[str]) -> None:
    """Run the recipe that a config function returns."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError("train needs a config, so it knows what to run; write vla-rl train FILE.py:function.")
    out, rest = take_option(list(arguments[1:]), "--out", f"runs/{arguments[0].rpartition(':')[2]}")
    recipe = override(load_config(arguments[0]), rest, f"vla-rl train {arguments[0]}")
    run(recipe, out, arguments[0] if hasattr(recipe, "policy") else RESUME)


def run(recipe: Any, out: str, resume: str = RESUME) -> dict[str, Any]:
    """Run ``recipe`` in the folder ``out`` and write its summary.

    Ctrl-C is raised again with a sentence that says what was saved and how the config ``resume`` goes on from there.
    """
    folder = RunFolder(out, recipe)
    if folder.moved_to:
        console.print(f"an earlier run was in {out}; it is now {folder.moved_to}.")
    try:
        summary: dict[str, Any] = recipe.run(folder)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_stopped(folder, resume)) from stop
    folder.write_summary(summary)
    console.print(f"done: {folder.path}")
    return summary


def _stopped(folder: RunFolder, resume: str) -> str:
    """How things stand after Ctrl-C; the checkpoint that is nearest to the end comes first."""
    for name in ("best", "imitation"):
        checkpoint = folder.checkpoint(name)
        if checkpoint.exists():
            command = f"vla-rl train {resume} --policy {checkpoint}"
            return f"stopped; the checkpoint {name!r} and metrics.jsonl are saved. To go on from it:\n  {command}"
    return f"stopped before the first checkpoint, so only what is in {str(folder.path)!r} was saved; start it again."


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
