"""Several methods that improve the same imitation policies on the same budget: unattended and resumable."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_rl.contract.trust import read_json
from vla_rl.evaluation import seed_ranges
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import metrics, stages
from vla_rl.recipes.compare_report import Compared, write_page
from vla_rl.recipes.config_files import config_function, load_config
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.sweep import Cell, run_sweep
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class Task:
    """One task: ``imitate`` and the values of ``methods`` {shown name: name} are functions of the config file."""

    name: str
    imitate: str
    methods: Mapping[str, str]
    out: Path


@dataclass(frozen=True)
class Comparison:
    """Every method of every task from the same imitation policies, on several training seeds.

    target   validation success whose cost in control steps is tabled
    command  what the page says made it
    """

    config: str
    tasks: tuple[Task, ...]
    seeds: tuple[int, ...]
    processes: int
    target: float
    out: Path
    command: str

    def run(self) -> None:
        """Imitate once per task and seed, improve by every method, write ``results.json`` and ``report.html``."""
        for task in self.tasks:
            for function in (task.imitate, *task.methods.values()):
                load_config(f"{self.config}:{function}")  # an unknown name should be known before hours of work
        first = [self._imitation(task, seed) for task in self.tasks for seed in self.seeds]
        second = [self._cell(task, name, seed) for task in self.tasks for seed in self.seeds for name in task.methods]
        run_sweep(self.out, {"imitate": first, "improve": second}, self.processes)
        compared = [self._compared(task, name) for task in self.tasks for name in task.methods]
        rows = [row for item in compared for curve in item.curves.values() for row in curve]
        write_json(self.out / "results.json", rows)
        before = {task.name: {seed: self._before(task, seed) for seed in self.seeds} for task in self.tasks}
        write_page(self.out / "report.html", compared, before, self.target, self.command)

    def _imitation(self, task: Task, seed: int) -> Cell:
        return Cell(task.out / f"imitate-{seed}", f"{self.config}:{task.imitate}", ("--seed", str(seed)))

    def _cell(self, task: Task, name: str, seed: int) -> Cell:
        start = task.out / f"imitate-{seed}"
        policy, demonstrations = start / "checkpoints" / "imitation", start / "demonstrations"
        given = ("--seed", str(seed), "--policy", str(policy), "--demonstrations", str(demonstrations))
        return Cell(task.out / f"{name}-{seed}", f"{self.config}:{task.methods[name]}", given)

    def _before(self, task: Task, seed: int) -> JsonObject:
        """The imitation policy's own success on the test scenes, played once."""
        folder = task.out / f"imitate-{seed}"
        if not (folder / "test.json").exists():
            recipe = load_config(f"{self.config}:{task.imitate}")
            policy = load_policy(folder / "checkpoints" / "imitation")
            scenes = seed_ranges.held_out(seed_ranges.TEST, recipe.evaluation.test)
            outcomes = stages.play(recipe.env, policy, scenes, recipe.evaluation, seed, f"test {folder.name}")
            write_json(folder / "test.json", asdict(outcomes.rate))
        rate: JsonObject = read_json(folder / "test.json")
        return rate

    def _compared(self, task: Task, name: str) -> Compared:
        about = inspect.getdoc(config_function(f"{self.config}:{task.methods[name]}")) or ""
        folders = {seed: task.out / f"{name}-{seed}" for seed in self.seeds}
        curves = {seed: _curve(folder, task.name, name, seed) for seed, folder in folders.items()}
        after = {seed: metrics.summary(folder) for seed, folder in folders.items()}
        return Compared(name, task.name, about, curves, after)


def _curve(folder: Path, task: str, name: str, seed: int) -> list[JsonObject]:
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
