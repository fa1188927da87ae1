"""What a config function returns: a frozen dataclass that says everything about a run and can run itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from vla_rl.contract.config import JsonObject, to_json
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.report import Report, Tile
from vla_rl.recipes import metrics
from vla_rl.recipes.config_files import keep_file, load_kept_files
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.metrics import BAND, SCORE
from vla_rl.recipes.terminal import console, sigterm_like_ctrl_c
from vla_rl.recipes.workers import worker_processes
from vla_rl.training.checkpoint import resuming
from vla_rl.training.device import resolve_device
from vla_rl.training.distributed import barrier, torchrun_processes
from vla_rl.training.tracking import RunFolder, config_of, prolong

_LENGTHS = (".loop.iterations", ".loop.env-steps")


class Recipe(Protocol):
    """Anything that ``vla-rl train`` can run."""

    def run(self, folder: RunFolder) -> JsonObject:
        """Do it, leaving everything in ``folder``; returns what belongs into ``summary.json``."""


def run(recipe: Recipe, out: str, source: Path | None = None, command: Sequence[str] = ()) -> JsonObject:
    """Run ``recipe`` in the folder ``out`` and write its summary; torchrun's further processes have folders in it.

    ``source`` is the config file that it comes from: the run keeps a copy.  It keeps the words of the ``command`` as
    well.  An environment of the user's own is checked
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
            folder.add_command(command)
            if folder.moved_to:
                console.print(f"an earlier run was in {out}; it is now {folder.moved_to}.")
        barrier(group)
        if group.rank:
            folder = RunFolder(out, recipe, group)
        return run_in(folder)


def resume(
    out: str, change: Callable[[object], object] = lambda config: config, command: Sequence[str] = ()
) -> JsonObject:
    """Go on with the run in the folder ``out``, in as many processes as it was begun by.

    ``change(config)`` may raise the length of its reinforcement learning, also of a run that is finished; the words of
    the ``command`` that does are kept.
    """
    load_kept_files(Path(out))
    before: object = config_of(Path(out))
    require_recipe(before, out)
    after = change(before)
    require_longer(to_json(before), to_json(after))
    device = resolve_device(getattr(before, "device", "cpu"))
    with torchrun_processes(device) as group:
        if group.rank == 0 and after != before:
            begin = prolong(Path(out), after, group.size)
            console.print(f"{out} goes on from iteration {begin}, its last saved state.")
        barrier(group)
        folder = RunFolder.resume(out, group)
        if group.rank == 0 and after != before:
            folder.add_command(command)
        return run_in(folder)


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


_POINTS = 300  # of a curve
_SECTIONS = ("eval", "rollout", "policy", "critic", "replay", "env", "time", "")
_CLOCKS = ("stage", "step", "elapsed_s", "env/steps_total")
# What a summary calls its results, and the episodes that they are of.
RESULTS = {
    "imitation": ("imitation", "test episodes"),
    "validation": ("imitation", "validation episodes"),
    "rl": ("after RL", "test episodes"),
    "return": ("mean return after RL", "test episodes"),
}
_TITLES = {
    "eval": "Validation",
    "rollout": "Exploration",
    "policy": "Policy",
    "critic": "Critic",
    "replay": "Replay buffer",
    "env": "Environment",
    "time": "Seconds per iteration",
    "": "Training",
}


def write_run_report(folder: RunFolder, summary: JsonObject) -> Path:
    """Write ``report.html`` into the run folder, unless the recipe has done so; returns its path."""
    path = folder.path / "report.html"
    if path.exists():
        return path
    about = (type(folder.config).__doc__ or "").strip().partition("\n")[0]
    report, lines = Report(folder.path.name, about), metrics.rows(folder.path)
    percent = any("success" in item for item in summary.values() if isinstance(item, dict))
    if tiles := [*_before(lines, percent), *_tiles(summary)]:
        report.tiles(tiles)
    seconds = summary.get("seconds", {})
    report.table(["stage", "seconds"], [[stage, round(value, 1)] for stage, value in seconds.items()])
    for stage in dict.fromkeys(line["stage"] for line in lines):
        _curves(report, stage, [line for line in lines if line["stage"] == stage], percent)
    report.section("Settings", "As in `config.json`.")
    report.table(["field", "value"], [list(row) for row in _flat(to_json(folder.config))])
    report.command(f"vla-rl inspect {folder.path}")
    return report.write(path)


def _before(lines: list[JsonObject], percent: bool) -> Iterator[Tile]:
    """The first validation, beside which the results are seen; none where that was all."""
    scored = [line for line in lines if line.get(SCORE) is not None]
    if len(scored) > 1:
        first = scored[0]
        note = f"{first['eval/episodes']:.0f} validation episodes" if "eval/episodes" in first else "validation"
        low, high = (first.get(name) for name in BAND)
        yield Tile("before", first[SCORE], low, high, percent=percent, note=note)


def _tiles(summary: JsonObject) -> Iterator[Tile]:
    """Every rate and mean return in the summary."""
    for name, item in summary.items():
        if not isinstance(item, dict) or not {"low", "high", "episodes"} <= item.keys():
            continue
        what, note = RESULTS.get(name, (name, "episodes"))
        note = f"{item['episodes']} {note}"
        if "success" in item:
            yield Tile(what, item["success"], item["low"], item["high"], note=note)
        elif "mean" in item:
            yield Tile(what, item["mean"], item["low"], item["high"], percent=False, note=note)


def _curves(report: Report, stage: str, lines: list[JsonObject], percent: bool) -> None:
    """A chart for every metric of one stage that changes, over control steps where they are counted.

    The score has its interval as a band; what never changes is one line of text.
    """
    clock, label = ("env/steps_total", "control steps") if "env/steps_total" in lines[-1] else ("step", "step")
    names = dict.fromkeys(name for line in lines for name in line if name not in _CLOCKS)
    for section in _SECTIONS:
        chosen = [name for name in names if name.rpartition("/")[0].partition("/")[0] == section and name not in BAND]
        if chosen:
            report.section(f"{_TITLES[section]} ({stage})")
        values = {name: {line[name] for line in lines if line.get(name) is not None} for name in chosen}
        for name in (name for name in chosen if len(values[name]) > 1):
            known = thinned([line for line in lines if line.get(name) is not None and clock in line])
            points = metrics.curve_of(stage, known, clock, name, *(BAND if name == SCORE else ()))
            report.curves(name, label, name.rpartition("/")[2], [points], percent and name == SCORE)
        same = [f"`{name}` {next(iter(values[name])):.4g}" for name in chosen if len(values[name]) == 1]
        report.text(f"The same throughout: {', '.join(same)}." if same else "")


def thinned(lines: list[JsonObject]) -> list[JsonObject]:
    """At most ``_POINTS`` of ``lines`` at equal distances, the first and the last among them."""
    chosen = np.linspace(0, len(lines) - 1, min(len(lines), _POINTS)).round().astype(int)
    return [lines[i] for i in chosen]


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, value) of everything in a config's JSON."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}".lstrip("."))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
