"""``vla-rl study``: every flow sampler from the same imitation policies, on several training seeds, unattended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.cli.override import override
from vla_rl.evaluation.report import Report, Series
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes import metrics
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.demo_report import percent
from vla_rl.recipes.progress import console
from vla_rl.recipes.sweep import Cell, run_cells
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class Study:
    """The cells are separate processes, one per core; those whose ``summary.json`` exists are not run again."""

    samplers: tuple[str, ...] = ("last_step", "one_step", "all_steps", "flow_ou", "flow_ddim", "flow_noise")
    config: str = "demo.py"  # its functions of these names, and "imitate"
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    out: str = "runs/study"


def study(arguments: Sequence[str]) -> None:
    """Imitate once per seed, improve with every sampler, write ``results.json`` and ``report.html``."""
    config: Study = override(Study(), arguments, "vla-rl study")
    for function in ("imitate", *config.samplers):
        load_config(f"{config.config}:{function}")  # an unknown name should be known before hours of work
    out = Path(config.out)
    first = [Cell(out / f"imitate-{seed}", f"{config.config}:imitate", ("--seed", str(seed))) for seed in config.seeds]
    second = [
        Cell(
            out / f"{sampler}-{seed}",
            f"{config.config}:{sampler}",
            ("--seed", str(seed), "--policy", str(out / f"imitate-{seed}" / "checkpoints" / "imitation")),
        )
        for sampler in config.samplers
        for seed in config.seeds
    ]
    try:
        run_cells(first, config.processes, "imitate")
        run_cells(second, config.processes, "improve")
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; what is finished stays in {out}, the same command goes on.") from stop
    rows = [_row(out, sampler, seed) for sampler in config.samplers for seed in config.seeds]
    write_json(out / "results.json", rows)
    _report(out, rows, config)
    console.print(f"{out}/results.json, {out}/report.html")


def _row(out: Path, sampler: str, seed: int) -> dict[str, Any]:
    before = json.loads((out / f"imitate-{seed}" / "summary.json").read_text())
    after = json.loads((out / f"{sampler}-{seed}" / "summary.json").read_text())
    names = ("env_steps", "env_steps_at_best", "episodes")
    return {
        "sampler": sampler,
        "seed": seed,
        "imitation_validation": before["validation"],
        **after["rl"],
        **{f"train_{name}": after[name] for name in names},
        "seconds": after["seconds"]["rl"],
    }


def _report(out: Path, rows: list[dict[str, Any]], config: Study) -> None:
    subtitle = "The same imitation policies, the same budget of control steps, test seeds"
    report = Report("Flow samplers side by side", subtitle)
    table = []
    for sampler in config.samplers:
        mine = [row for row in rows if row["sampler"] == sampler]
        values = [row["success"] for row in mine]
        rates = [percent(Rate(row["success"], row["low"], row["high"], row["episodes"])) for row in mine]
        mean = f"{sum(values) / len(values):.1%} ({min(values):.1%} to {max(values):.1%})"
        table.append([sampler, *rates, mean, f"{sum(row['seconds'] for row in mine) / len(mine):.0f}"])
    report.table(["sampler", *(f"seed {seed}" for seed in config.seeds), "mean (min to max)", "seconds of RL"], table)
    for seed in config.seeds:
        report.curves(
            f"Validation success, seed {seed}",
            "control steps",
            "success",
            [_curve(out, sampler, seed) for sampler in config.samplers],
            percent=True,
        )
    report.command("vla-rl study")
    report.write(out / "report.html")


def _curve(out: Path, sampler: str, seed: int) -> Series:
    rows = [row for row in metrics.rows(out / f"{sampler}-{seed}") if "eval/score" in row]
    return Series(sampler, [row["env/steps_total"] for row in rows], [row["eval/score"] for row in rows])
