"""``vla-rl compare``: many ways to improve the same imitation policies on the same budget, unattended, resumable."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vla_rl.cli.override import override
from vla_rl.evaluation import suite
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import metrics, stages
from vla_rl.recipes.compare_report import Compared, write_page
from vla_rl.recipes.config_files import config_function, load_config
from vla_rl.recipes.progress import console
from vla_rl.recipes.sweep import Cell, run_cells
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
    place: tuple[str, ...] = ("residual_td3", "rlpd", "wsrl", "grpo")  # the best four on lift
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
    compared = [_compared(config, task, name) for task, names in tasks.items() for name in names]
    write_json(out / "results.json", [row for item in compared for curve in item.curves.values() for row in curve])
    before = {task: {seed: _before(config, task, seed) for seed in config.seeds} for task in tasks}
    write_page(out / "report.html", compared, before, config.target)
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


def _before(config: Compare, task: str, seed: int) -> dict[str, Any]:
    """The imitation policy's own success on the test scenes, played once."""
    folder = Path(config.out) / task / f"imitate-{seed}"
    if not (folder / "test.json").exists():
        recipe = load_config(f"{config.config}:imitate_{task}")
        policy = load_policy(folder / "checkpoints" / "imitation")
        scenes = suite.held_out(suite.TEST, recipe.evaluation.test)
        outcomes = stages.play(recipe.env, policy, scenes, recipe.evaluation, seed, f"test {folder.name}")
        write_json(folder / "test.json", asdict(outcomes.rate))
    rate: dict[str, Any] = json.loads((folder / "test.json").read_text(encoding="utf-8"))
    return rate


def _compared(config: Compare, task: str, name: str) -> Compared:
    about = inspect.getdoc(config_function(f"{config.config}:{_function(task, name)}")) or ""
    folders = {seed: Path(config.out) / task / f"{name}-{seed}" for seed in config.seeds}
    curves = {seed: _curve(folder, task, name, seed) for seed, folder in folders.items()}
    after = {seed: json.loads((at / "summary.json").read_text(encoding="utf-8")) for seed, at in folders.items()}
    return Compared(name, task, about, curves, after)


def _curve(folder: Path, task: str, name: str, seed: int) -> list[dict[str, Any]]:
    """One row per validation."""
    found = [row for row in metrics.rows(folder, "rl") if "eval/score" in row]
    return [
        {
            "algorithm": name,
            "task": task,
            "seed": seed,
            "env_steps": int(row["env/steps_total"]),
            "seconds": round(row["elapsed_s"] - found[0]["elapsed_s"], 1),
            "success": row["eval/score"],
            "low": row["eval/score_low"],
            "high": row["eval/score_high"],
            "episodes": int(row["eval/episodes"]),
        }
        for row in found
    ]
