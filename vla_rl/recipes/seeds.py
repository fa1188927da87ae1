"""``vla-rl train CONFIG --seeds N``: the same config on the training seeds 1 to N, side by side, in one table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.report import Report, Series, across_seeds
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes import metrics
from vla_rl.recipes.progress import console
from vla_rl.recipes.sweep import Cell, run_sweep
from vla_rl.training.tracking import write_json

_RESULTS = ("imitation", "validation", "rl")  # rates of a summary, in the order in which they come about
_RETURN = "return"  # of one without a rule of success


def train_seeds(config: str, count: int, out: Path, arguments: Sequence[str], processes: int) -> None:
    """Train in ``out/seed-1`` to ``out/seed-N``; ``{seed}`` in an argument stands for the seed.

    Writes ``results.json`` and ``report.html``.  What is finished is not run again; what was stopped goes on.
    """
    if count < 1 or processes < 1:
        raise UserError(f"--seeds {count} --processes {processes} runs nothing; give both at least 1.")
    cells = [
        Cell(
            out / f"seed-{seed}",
            config,
            ("--seed", str(seed), *(argument.replace("{seed}", str(seed)) for argument in arguments)),
        )
        for seed in range(1, count + 1)
    ]
    run_sweep(out, {"train": cells}, processes)
    rows = [{"seed": seed, **metrics.summary(cell.out)} for seed, cell in enumerate(cells, 1)]
    write_json(out / "results.json", rows)
    command = f"vla-rl train {config} --seeds {count} --out {out} {shlex.join(arguments)}".strip()
    _report(out, rows, cells, command)
    for line in _table(rows):
        console.print("  ".join(line))
    console.print(f"{out}/results.json, {out}/report.html")


def _table(rows: list[JsonObject]) -> list[list[str]]:
    """A line per result and, where there are several kinds of tasks, per kind; intervals are those of each seed."""
    lines = []
    for name in _RESULTS:
        if name in rows[0]:
            lines.append(_line(name, [row[name] for row in rows]))
    if _RETURN in rows[0]:
        means = [row[_RETURN]["mean"] for row in rows]
        each = ["{mean:.4g} [{low:.4g}, {high:.4g}]".format(**row[_RETURN]) for row in rows]
        lines.append([_RETURN, *each, f"{sum(means) / len(means):.4g} ({min(means):.4g} to {max(means):.4g})"])
    families = rows[0].get("families", {})
    for name in families if len(families) > 1 else ():
        lines.append(_line(name, [row["families"][name] for row in rows]))
    return lines


def _line(name: str, rates: list[JsonObject]) -> list[str]:
    return [name, *across_seeds([Rate(**rate) for rate in rates])]


def _report(out: Path, rows: list[JsonObject], cells: Sequence[Cell], command: str) -> None:
    last = next((name for name in (_RETURN, *reversed(_RESULTS)) if name in rows[0]), "")
    what = "Mean return" if last == _RETURN else "Success"
    subtitle = f"{what}, each seed with its own interval; {rows[0][last]['episodes']} episodes each" if last else ""
    report = Report("Training seeds side by side", subtitle)
    report.table(["", *(f"seed {row['seed']}" for row in rows), "mean (min to max)"], _table(rows))
    seconds = [[stage, *(f"{row['seconds'].get(stage, 0):.0f}" for row in rows)] for stage in rows[0]["seconds"]]
    report.table(["seconds", *(f"seed {row['seed']}" for row in rows)], seconds)
    families = list(rows[0].get("families", {}))
    for name in ["", *families] if len(families) > 1 else [""]:
        found = [_curve(cell.out, f"seed {row['seed']}", name) for row, cell in zip(rows, cells, strict=True)]
        if curves := [curve for curve in found if curve]:
            title = f"Validation {what.lower()}"
            report.curves(f"{title}: {name}" if name else title, "control steps", what.lower(), curves, last != _RETURN)
    report.command(command)
    report.write(out / "report.html")


def _curve(folder: Path, label: str, family: str = "") -> Series | None:
    """Validation success over control steps, of one kind of task if ``family`` is given; None where there is none."""
    key = f"eval/{family}" if family else "eval/score"
    lines = metrics.rows(folder)
    found = [line for line in lines if key in line and "env/steps_total" in line]
    if not found:
        return None
    return Series(label, [line["env/steps_total"] for line in found], [line[key] for line in found])
