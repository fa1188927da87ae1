"""``vla-rl compare``: many ways to improve the same imitation policies on the same budget, unattended, resumable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vla_rl.cli.cells import Cell, run_cells
from vla_rl.cli.configs import load_config, override
from vla_rl.cli.progress import console
from vla_rl.cli.story import percent
from vla_rl.evaluation.report import Bar, Report, Series
from vla_rl.evaluation.stats import Rate
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class Compare:
    """The cells are separate processes, one per core; those whose ``summary.json`` exists are not run again.

    An algorithm's name is that of a function in ``config``; on another task than the first, "TASK_NAME" is.
    """

    lift: tuple[str, ...] = (
        "flow_sde",
        "flow_noise",
        "grpo",
        "residual_td3",
        "residual_ppo",
        "rlpd",
        "wsrl",
        "dsrl",
        "dppo",
        "gorl",
    )
    place: tuple[str, ...] = ()
    config: str = "compare.py"  # besides the algorithms, "imitate_lift" and "imitate_place"
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    target: float = 0.85  # validation success whose cost in control steps is tabled
    out: str = "runs/compare"


def compare(arguments: Sequence[str]) -> None:
    """Imitate once per task and seed, improve in every way, write ``results.json`` and ``report.html``."""
    config: Compare = override(Compare(), arguments, "vla-rl compare")
    tasks = {task: names for task, names in (("lift", config.lift), ("place", config.place)) if names}
    for task, names in tasks.items():
        for function in (f"imitate_{task}", *(_function(task, name) for name in names)):
            load_config(f"{config.config}:{function}")  # an unknown name should be known before hours of work
    out = Path(config.out)
    try:
        run_cells(
            [_imitation(config, task, seed) for task in tasks for seed in config.seeds], config.processes, "imitate"
        )
        cells = [
            _cell(config, task, name, seed) for task, names in tasks.items() for seed in config.seeds for name in names
        ]
        run_cells(cells, config.processes, "improve")
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; what is finished stays in {out}, the same command goes on.") from stop
    curves = {
        (task, name, seed): _curve(out, task, name, seed)
        for task in tasks
        for name in tasks[task]
        for seed in config.seeds
    }
    write_json(out / "results.json", [row for rows in curves.values() for row in rows])
    _report(config, tasks, curves)
    console.print(f"{out}/results.json, {out}/report.html")


def _function(task: str, name: str) -> str:
    return name if task == "lift" else f"{task}_{name}"


def _imitation(config: Compare, task: str, seed: int) -> Cell:
    out = Path(config.out) / task / f"imitate-{seed}"
    return Cell(out, f"{config.config}:imitate_{task}", ("--seed", str(seed)))


def _cell(config: Compare, task: str, name: str, seed: int) -> Cell:
    start = Path(config.out) / task / f"imitate-{seed}"
    taken = ("--policy", str(start / "checkpoints" / "imitation"), "--demonstrations", str(start / "demonstrations"))
    function = f"{config.config}:{_function(task, name)}"
    return Cell(Path(config.out) / task / f"{name}-{seed}", function, ("--seed", str(seed), *taken))


def _curve(out: Path, task: str, name: str, seed: int) -> list[dict[str, Any]]:
    """One row per validation."""
    lines = (out / task / f"{name}-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row for row in map(json.loads, lines) if row["stage"] == "rl" and "validation" in row]
    return [
        {
            "algorithm": name,
            "task": task,
            "seed": seed,
            "env_steps": int(row["env_steps_total"]),
            "seconds": round(row["elapsed_s"] - found[0]["elapsed_s"], 1),
            "success": row["validation"],
            "low": row["validation_low"],
            "high": row["validation_high"],
            "episodes": int(row["validation_episodes"]),
        }
        for row in found
    ]


def steps_to(curve: Sequence[dict[str, Any]], target: float) -> int | None:
    """Control steps at the first of two consecutive validations of at least ``target``; None if there are none."""
    for one, two in pairwise(curve):
        if min(one["success"], two["success"]) >= target:
            return int(one["env_steps"])
    return None


# -- the page ----------------------------------------------------------------------------------------------------------

_Curves = dict[tuple[str, str, int], list[dict[str, Any]]]


def _report(config: Compare, tasks: dict[str, tuple[str, ...]], curves: _Curves) -> None:
    subtitle = (
        "The same imitation policies and demonstrations, the same budget of control steps, never pooled over seeds"
    )
    report = Report("Ways to improve a policy, side by side", subtitle)
    for task, names in tasks.items():
        report.section(task.capitalize())
        _results(report, config, task, names, curves)
        for name in names:
            lines = [_series(curves[task, name, seed], f"seed {seed}") for seed in config.seeds]
            report.curves(f"{task}: {name}", "control steps", "validation success", lines, percent=True)
    report.command("vla-rl compare")
    report.write(Path(config.out) / "report.html")


def _results(report: Report, config: Compare, task: str, names: Sequence[str], curves: _Curves) -> None:
    """Test success before and after, in how many steps the target was reached, and seconds."""
    folder = Path(config.out) / task
    before = {seed: _summary(folder / f"imitate-{seed}")["validation"] for seed in config.seeds}
    rows = [["imitation, validation scenes", *_line([before[seed] for seed in config.seeds]), "", ""]]
    bars = [
        Bar("imitation", before[s]["success"], before[s]["low"], before[s]["high"], f"seed {s}", True)
        for s in config.seeds
    ]
    after = {(name, seed): _summary(folder / f"{name}-{seed}") for name in names for seed in config.seeds}
    for name in names:
        reached = [steps_to(curves[task, name, seed], config.target) for seed in config.seeds]
        seconds = [after[name, seed]["seconds"]["rl"] for seed in config.seeds]
        cost = ", ".join("–" if steps is None else f"{steps / 1000:.0f}k" for steps in reached)
        rows.append(
            [
                name,
                *_line([after[name, seed]["rl"] for seed in config.seeds]),
                cost,
                f"{sum(seconds) / len(seconds):.0f}",
            ]
        )
        for seed in config.seeds:
            rate = after[name, seed]["rl"]
            bars.append(Bar(name, rate["success"], rate["low"], rate["high"], f"seed {seed}"))
    seeds = [f"seed {seed}" for seed in config.seeds]
    header = ["", *seeds, "mean (min to max)", f"steps to {config.target:.0%}, by seed", "seconds"]
    episodes = after[names[0], config.seeds[0]]["rl"]["episodes"]
    report.table(header, rows, f"Success on {episodes} test scenes with 95 % intervals.")
    report.bars(f"{task}: test success", sorted(bars, key=lambda bar: bar.group))


def _line(rates: list[dict[str, Any]]) -> list[str]:
    values = [rate["success"] for rate in rates]
    return [
        *(percent(Rate(**rate)) for rate in rates),
        f"{sum(values) / len(values):.1%} ({min(values):.1%} to {max(values):.1%})",
    ]


def _series(curve: Sequence[dict[str, Any]], name: str) -> Series:
    parts = {key: [row[key] for row in curve] for key in ("env_steps", "success", "low", "high")}
    return Series(name, parts["env_steps"], parts["success"], parts["low"], parts["high"])


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary
