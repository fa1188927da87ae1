"""What a config function returns: a frozen dataclass that says everything about a run and can run itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from vla_rl.contract.config import to_json
from vla_rl.contract.errors import UserError
from vla_rl.recipes import metrics
from vla_rl.recipes.config_files import keep_file, load_kept_files
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.progress import console
from vla_rl.recipes.run_report import write_run_report
from vla_rl.recipes.signals import sigterm_like_ctrl_c
from vla_rl.recipes.workers import worker_processes
from vla_rl.training.device import resolve_device
from vla_rl.training.distributed import barrier, torchrun_processes
from vla_rl.training.shared_state import resuming
from vla_rl.training.tracking import RunFolder, config_of, prolong

_LENGTHS = (".loop.iterations", ".loop.env-steps", "--loop.iterations", "--loop.env-steps")


class Recipe(Protocol):
    """Anything that ``vla-rl train`` can run."""

    def run(self, folder: RunFolder) -> JsonObject:
        """Do it, leaving everything in ``folder``; returns what belongs into ``summary.json``."""


def run(recipe: Recipe, out: str, source: Path | None = None) -> JsonObject:
    """Run ``recipe`` in the folder ``out`` and write its summary; torchrun's further processes have folders in it.

    ``source`` is the config file that it comes from: the run keeps a copy.  An environment of the user's own is checked
    first, so that a mistake in it leaves no run folder.
    """
    if isinstance(env := getattr(recipe, "env", None), EnvConfig):
        env.check()
    device = resolve_device(getattr(recipe, "device", "cpu"))  # one GPU for each of torchrun's processes
    with torchrun_processes(device) as group:
        if group.rank == 0:
            folder = RunFolder(out, recipe, group)
            if source is not None:
                keep_file(source, folder.path)
            if folder.moved_to:
                console.print(f"an earlier run was in {out}; it is now {folder.moved_to}.")
        barrier(group)
        if group.rank:
            folder = RunFolder(out, recipe, group)
        return run_in(folder)


def resume(out: str, change: Callable[[object], object] = lambda config: config) -> JsonObject:
    """Go on with the run in the folder ``out``, in as many processes as it was begun by.

    ``change(config)`` may raise the length of its reinforcement learning, also of a run that is finished.
    """
    load_kept_files(Path(out))
    before: object = config_of(Path(out))
    require_recipe(before, out)
    after = change(before)
    require_longer(to_json(before), to_json(after))
    device = resolve_device(getattr(before, "device", "cpu"))
    with torchrun_processes(device) as group:
        if group.rank == 0 and after != before:
            console.print(f"{out} goes on from iteration {prolong(Path(out), after)}, its last saved state.")
        barrier(group)
        return run_in(RunFolder.resume(out, group))


def require_recipe(config: object, out: str | Path) -> None:
    """Raise UserError for the ``config`` of a folder ``out`` that is none of a run."""
    if not hasattr(config, "run"):
        raise UserError(f"the config.json of {str(out)!r} is none of a run, so nothing goes on; name a run folder.")


def require_longer(before: object, after: object, name: str = "-") -> None:
    """Raise UserError unless ``after`` differs from ``before``, configs as JSON, in a longer loop at most.

    ``name``: the option that they are of.
    """
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in before:
            require_longer(before[key], after[key], f"{name}{'-' if name == '-' else '.'}{key.replace('_', '-')}")
    elif before != after:
        if not name.endswith(_LENGTHS):
            raise UserError(
                f"a resumed run has the config it began with, so {name!r} cannot change it; leave it out, or give a "
                "larger --rl.loop.iterations or --rl.loop.env-steps, with which a finished run goes on."
            )
        longer = isinstance(before, int) and isinstance(after, int) and after > before > 0
        if not (longer or (after == 0 and name.endswith("env-steps"))):  # 0 is no limit
            raise UserError(
                f"{name} {after} ends the run no later than its own {before or 'none'}, so there is nothing to go on "
                "to; give a larger number."
            )


def run_in(folder: RunFolder) -> JsonObject:
    """Run, or go on with, the recipe of ``folder``.

    Ctrl-C and SIGTERM are raised again with a sentence that says how to go on.
    """
    try:
        with sigterm_like_ctrl_c(), worker_processes(str(folder.run)):
            summary: JsonObject = folder.config.run(folder)
    except UserError:
        if folder.discard_if_empty():
            console.print(f"nothing was recorded, so the earlier run is in {folder.path} again.")
        raise
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; go on with: {resuming(folder.run, folder.group.size)}") from stop
    finally:
        folder.close()
    folder.write_summary(summary)
    if diverged := int(sum(line.get("rollout/diverged", 0) for line in metrics.rows(folder.path))):
        console.print(
            f"{diverged} training episodes were cut off because a reward or an observation was not finite "
            "(rollout/diverged); look at the environment."
        )
    page = write_run_report(folder, summary)
    console.print(f"done: {folder.path}  ({page.name})")
    return summary
