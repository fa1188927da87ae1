"""``vla-rl imagine study``: RL in dreams without one part at a time, on several training seeds, unattended.

Ways that learn the same world model from the same episodes share it, so that they differ in one part alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.evaluation.report import Bar, Report
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.demo_report import percent
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.metrics import watched
from vla_rl.recipes.progress import console
from vla_rl.recipes.sweep import Cell, run_cells
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class ImagineStudy:
    """The cells are separate processes, one per core; those whose ``summary.json`` exists are not run again."""

    ways: tuple[str, ...] = (
        "lift",
        "no_keyframes",
        "no_uncertainty",
        "no_second_dream",
        "no_coevolution",
        "residual_td3",
    )
    config: str = "imagine.py"
    imitation: str = "demo.py:imitate"
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    out: str = "runs/imagine-study"


def run_study(config: ImagineStudy) -> None:
    """Imitate once per seed, improve in every way, write ``results.json`` and ``report.html``."""
    for function in (config.imitation, *(f"{config.config}:{way}" for way in config.ways)):
        load_config(function)  # an unknown name should be known before hours of work
    out = Path(config.out)
    first = [Cell(_imitation(out, seed), config.imitation, ("--seed", str(seed))) for seed in config.seeds]
    try:
        run_cells(first, config.processes, "imitate")
        for ways in _in_turn(config):
            cells = [_cell(config, way, ways[way], seed) for seed in config.seeds for way in ways]
            run_cells(cells, config.processes, "improve")
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped; what is finished stays in {out}, the same command goes on.") from stop
    rows = [_row(out, way, seed) for way in config.ways for seed in config.seeds]
    write_json(out / "results.json", rows)
    _report(out, rows, config)
    console.print(f"{out}/results.json, {out}/report.html")


def _imitation(out: Path, seed: int) -> Path:
    return out / f"imitation-{seed}"


def _in_turn(config: ImagineStudy) -> tuple[dict[str, str], dict[str, str]]:
    """The ways that learn a world of their own, and those that begin with one: way -> whose world.

    Ways that would learn the same from the same episodes differ in nothing but how it is used then.
    """
    learnt = {way: _learnt(load_config(f"{config.config}:{way}")) or way for way in config.ways}
    whose = {way: next(other for other in config.ways if learnt[other] == learnt[way]) for way in config.ways}
    own = {way: one for way, one in whose.items() if way == one}
    return own, {way: one for way, one in whose.items() if way != one}


def _learnt(recipe: Any) -> Any:
    """What a recipe's world model is learnt from, and how; None for one without."""
    if not isinstance(recipe, Imagine):
        return None
    plan = recipe.plan
    return plan.model, plan.gather, plan.demonstrations, plan.fit


def _cell(config: ImagineStudy, way: str, whose: str, seed: int) -> Cell:
    out = Path(config.out)
    function, start = f"{config.config}:{way}", _imitation(out, seed)
    given = ["--seed", str(seed), "--policy", str(start / "checkpoints" / "imitation")]
    if hasattr(load_config(function), "demonstrations"):  # recipes in the simulator may learn from them
        given += ["--demonstrations", str(start / "demonstrations")]
    if way != whose:
        given += ["--plan.begin-with", str(out / f"{whose}-{seed}")]
    return Cell(out / f"{way}-{seed}", function, tuple(given))


def _row(out: Path, way: str, seed: int) -> dict[str, Any]:
    """Recipes in dreams and in the simulator say in their own words what they reached and what it took."""
    found = json.loads((out / f"{way}-{seed}" / "summary.json").read_text(encoding="utf-8"))
    if "imagined_rl" in found:
        after, episodes = found["imagined_rl"], found["simulator_episodes"]
    else:
        validated = sum(row["played"] for row in watched(out / f"{way}-{seed}"))
        after, episodes = found["rl"], found["episodes"] + validated
    seconds = round(sum(found["seconds"].values()), 1)
    told = {name: found.get(name) for name in ("imitation", "gain")}  # on the same scenes, where dreams were judged
    return {"way": way, "seed": seed, **after, **told, "simulator_episodes": episodes, "seconds": seconds}


def _report(out: Path, rows: list[dict[str, Any]], config: ImagineStudy) -> None:
    report = Report(
        "Reinforcement learning in dreams, without one part at a time",
        "The same imitation policies; success on test scenes of the simulator",
    )
    ways = {_name(way): [row for row in rows if row["way"] == way] for way in config.ways}
    seeds = [f"seed {seed}" for seed in config.seeds]
    reached = {"imitation": [_before(out, rows, seed) for seed in config.seeds]} | ways
    report.table(["", *seeds, "mean"], [[name, *_told(found)] for name, found in reached.items()])
    report.table(
        ["points won", *seeds, "episodes", "seconds"],
        [[name, *_won(mine)] for name, mine in ways.items()],
        "Points won on imitation are told of the same scenes, for ways in dreams. Simulated episodes are all that "
        "were played after imitation, but the test's. Ways that share a world model count its episodes, but not the "
        "seconds that it took the first of them.",
    )
    for seed in config.seeds:
        mine = [row for row in rows if row["seed"] == seed]
        bars = [Bar(_name(row["way"]), row["success"], row["low"], row["high"]) for row in mine]
        report.bars(f"Test success, seed {seed}", bars)
    report.command("vla-rl imagine study")
    report.write(out / "report.html")


def _before(out: Path, rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Imitation on the test scenes, where a way told it, else on the validation scenes."""
    told = [row["imitation"] for row in rows if row["seed"] == seed and row["imitation"]]
    if told:
        return dict(told[0])
    return dict(json.loads((_imitation(out, seed) / "summary.json").read_text(encoding="utf-8"))["validation"])


def _told(found: Sequence[dict[str, Any]]) -> list[str]:
    """Success on every seed, and its mean."""
    rates = [Rate(*(one[name] for name in ("success", "low", "high", "episodes"))) for one in found]
    return [*map(percent, rates), f"{_mean([rate.success for rate in rates]):.1%}"]


def _won(mine: Sequence[dict[str, Any]]) -> list[Any]:
    """Points won on every seed; mean episodes and seconds."""
    spent = (round(_mean([row[name] for row in mine])) for name in ("simulator_episodes", "seconds"))
    return [*(_points(row["gain"]) for row in mine), *spent]


def _points(gain: dict[str, float] | None) -> str | None:
    if gain is None:
        return None
    mean, low, high = (100 * gain[name] for name in ("mean", "low", "high"))
    return f"{mean:+.1f} [{low:.1f}, {high:.1f}]"


def _name(way: str) -> str:
    return way.replace("_", " ")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
