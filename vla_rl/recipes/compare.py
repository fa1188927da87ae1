"""Several methods that improve the same imitation policies on the same budget: unattended and resumable."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from vla_rl.contract.config import JsonMapping, JsonObject
from vla_rl.contract.trust import read_json
from vla_rl.evaluation import seed_ranges
from vla_rl.evaluation.report import Bar, Report, Series, across_seeds
from vla_rl.evaluation.stats import Rate
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes import metrics
from vla_rl.recipes.config_files import config_function, load_config
from vla_rl.recipes.evaluators import play
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
            outcomes = play(recipe.env, policy, scenes, recipe.evaluation, seed, f"test {folder.name}")
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


_Curve = Sequence[JsonMapping]


@dataclass(frozen=True)
class Compared:
    """One algorithm on one task, by seed.

    about   what it is, the first paragraph, and what was found about it
    curves  rows of ``results.json``
    after   ``summary.json``
    """

    name: str
    task: str
    about: str
    curves: Mapping[int, _Curve]
    after: Mapping[int, JsonMapping]

    def gains(self, before: Mapping[int, JsonMapping]) -> list[float]:
        """Test success minus that of the imitation policy, by seed."""
        return [float(item["rl"]["success"] - before[seed]["success"]) for seed, item in self.after.items()]


def steps_to(curve: _Curve, target: float) -> int | None:
    """Control steps at the first of two consecutive validations of at least ``target``; None if there are none."""
    for one, two in pairwise(curve):
        if min(one["success"], two["success"]) >= target:
            return int(one["env_steps"])
    return None


def write_page(
    path: Path,
    compared: Sequence[Compared],
    before: Mapping[str, Mapping[int, JsonMapping]],
    target: float,
    command: str = "vla-rl compare",
) -> None:
    """``before`` {task: {seed: the imitation policy's test success}}."""
    subtitle = (
        "The same imitation policies and demonstrations, the same budget of control steps, never pooled over seeds"
    )
    report = Report("Methods that improve a policy, side by side", subtitle)
    for task in before:
        chosen = [item for item in compared if item.task == task]
        report.section(task.capitalize())
        _results(report, chosen, before[task], target)
        report.text("While learning, on validation scenes:")
        for item in chosen:
            lines = [_series(curve, f"seed {seed}") for seed, curve in item.curves.items()]
            report.curves(f"{task}: {item.name}", "control steps", "validation success", lines, percent=True)
        report.text("\n".join(f"- **{item.name}**: {' '.join(item.about.split())}" for item in chosen))
    report.command(command)
    report.write(path)


def _results(report: Report, chosen: Sequence[Compared], before: Mapping[int, JsonMapping], target: float) -> None:
    """Test success, gain over imitation, in how many steps the target was reached, and seconds; the best first."""
    ordered = sorted(chosen, key=lambda item: -sum(item.gains(before)))
    first = {seed: Rate(**rate) for seed, rate in before.items()}
    reached = {item.name: {seed: Rate(**after["rl"]) for seed, after in item.after.items()} for item in ordered}
    rows = [[name, *across_seeds(list(rates.values()))] for name, rates in {"imitation": first, **reached}.items()]
    header = ["", *(f"seed {seed}" for seed in before), "mean (min to max)"]
    episodes = next(iter(before.values()))["episodes"]
    report.table(header, rows, f"Success on {episodes} test scenes with 95 % intervals.")
    header = ["", "points gained over imitation, by seed", f"control steps to {target:.0%}, by seed", "seconds"]
    steps = f"{target:.0%} is reached at the first of two validations in a row that are at least as good."
    report.table(header, [_cost(item, before, target) for item in ordered], steps)
    if worse := [item for item in ordered if min(item.gains(before)) < 0]:
        report.text(
            "\n".join(f"- **Worse than imitation: {_worse_seeds(item, before)}.** {_found(item)}" for item in worse)
        )
    bars = [Bar.of("imitation", rate, f"seed {seed}", reference=True) for seed, rate in first.items()]
    for name, rates in reached.items():
        bars += [Bar.of(name, rate, f"seed {seed}") for seed, rate in rates.items()]
    report.bars("Test success", sorted(bars, key=lambda bar: bar.group))


def _cost(item: Compared, before: Mapping[int, JsonMapping], target: float) -> list[str]:
    reached = [steps_to(curve, target) for curve in item.curves.values()]
    seconds = [after["seconds"]["rl"] for after in item.after.values()]
    return [
        item.name,
        ", ".join(f"{100 * gain:+.1f}" for gain in item.gains(before)),
        ", ".join("–" if steps is None else f"{steps / 1000:.0f}k" for steps in reached),
        f"{sum(seconds) / len(seconds):.0f}",
    ]


def _worse_seeds(item: Compared, before: Mapping[int, JsonMapping]) -> str:
    """Its name, and the seeds on which it is worse."""
    lost = {seed: gain for seed, gain in zip(item.after, item.gains(before), strict=True) if gain < 0}
    return f"{item.name} on " + ", ".join(f"seed {seed} ({100 * gain:+.1f} points)" for seed, gain in lost.items())


def _found(item: Compared) -> str:
    """What its description says after the first paragraph."""
    found = " ".join(item.about.partition("\n\n")[2].split())
    return found or "Why has not been found out."


def _series(curve: _Curve, name: str) -> Series:
    parts = {key: [row[key] for row in curve] for key in ("env_steps", "success", "low", "high")}
    return Series(name, parts["env_steps"], parts["success"], parts["low"], parts["high"])
