"""RL in imagination with one part more or less at a time, on several training seeds, unattended.

Methods that train the same world model on the same episodes share it, so that they differ in one part alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.contract.config import JsonObject
from vla_rl.evaluation.report import Report
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes import metrics
from vla_rl.recipes.compare import Cell, line, on_device, run_sweep, seed_bars, seeds_table
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.imagine.recipe import Imagine
from vla_rl.recipes.workers import EngineOptions
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class ImagineStudy(EngineOptions):
    """The cells are separate processes, one per core; those whose ``summary.json`` exists are not run again."""

    methods: tuple[str, ...] = (
        "lift",
        "no_uncertainty",
        "with_keyframes",
        "with_resampling",
        "with_coevolution",
        "residual_td3",
    )
    config: str = "imagine.py"
    imitation: str = "demo.py:imitate"
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    device: str = "cpu"  # of all runs: "cpu", "cuda", "cuda:1", "auto"
    out: str = "runs/imagine-study"

    def run(self) -> None:
        """Imitate once per seed, improve by every method, write ``results.json`` and ``report.html``."""
        for function in (self.imitation, *(f"{self.config}:{method}" for method in self.methods)):
            load_config(function)  # an unknown name should be known before hours of work
        out = Path(self.out)
        first = [Cell(_imitation(out, seed), self.imitation, _given(self, seed)) for seed in self.seeds]
        second, third = (
            [_cell(self, method, methods[method], seed) for seed in self.seeds for method in methods]
            for methods in _in_turn(self)
        )
        steps = {"imitate": first, "train and improve": second, "improve": third}
        run_sweep(out, steps, self.processes)
        rows = [_row(out, method, seed) for method in self.methods for seed in self.seeds]
        write_json(out / "results.json", rows)
        _report(out, rows, self)


def _imitation(out: Path, seed: int) -> Path:
    return out / f"imitation-{seed}"


def _in_turn(config: ImagineStudy) -> tuple[dict[str, str], dict[str, str]]:
    """Methods that train a world model, and those that are initialised from one: method -> the method that trains it.

    Those that would train the same model on the same episodes differ only in its use.
    """
    trained = {method: _training(load_config(f"{config.config}:{method}")) or method for method in config.methods}
    model_of = {
        method: next(other for other in config.methods if trained[other] == trained[method])
        for method in config.methods
    }
    own = {method: one for method, one in model_of.items() if method == one}
    return own, {method: one for method, one in model_of.items() if method != one}


def _training(recipe: object) -> tuple[object, ...] | None:
    """What a recipe's world model is trained on, and how; None for a recipe without one."""
    if not isinstance(recipe, Imagine):
        return None
    plan = recipe.plan
    return plan.model, plan.collect, plan.demonstrations, plan.fit


def _cell(config: ImagineStudy, method: str, trainer: str, seed: int) -> Cell:
    out = Path(config.out)
    function, start = f"{config.config}:{method}", _imitation(out, seed)
    given = [*_given(config, seed), "--policy", str(start / "checkpoints" / "imitation")]
    if hasattr(load_config(function), "demonstrations"):  # recipes in the simulator may learn from them
        given += ["--demonstrations", str(start / "demonstrations")]
    if method != trainer:
        given += ["--plan.init-from", str(out / f"{trainer}-{seed}")]
    return Cell(out / f"{method}-{seed}", function, tuple(given))


def _given(config: ImagineStudy, seed: int) -> tuple[str, ...]:
    return ("--seed", str(seed), *on_device(config.device))


def _row(out: Path, method: str, seed: int) -> JsonObject:
    """Success and cost; recipes in imagination and in the simulator have other names for them."""
    found = metrics.summary(out / f"{method}-{seed}")
    if "imagined_rl" in found:
        after, episodes = found["imagined_rl"], found["simulator_episodes"]
    else:
        validated = sum(row["played"] for row in metrics.watched(out / f"{method}-{seed}"))
        after, episodes = found["rl"], found["episodes"] + validated
    seconds = round(sum(found["seconds"].values()), 1)
    paired = {name: found.get(name) for name in ("imitation", "gain")}  # on the same scenes; imagination only
    return {"method": method, "seed": seed, **after, **paired, "simulator_episodes": episodes, "seconds": seconds}


def _report(out: Path, rows: list[JsonObject], config: ImagineStudy) -> None:
    report = Report(
        "Reinforcement learning in imagination, with one part more or less at a time",
        "The same imitation policies; success on test scenes of the simulator",
    )
    methods = {_name(method): [row for row in rows if row["method"] == method] for method in config.methods}
    reached = {"imitation": [_before(out, rows, seed) for seed in config.seeds]} | methods
    rates = {name: [_rate(one) for one in found] for name, found in reached.items()}
    seeds_table(report, [line(name, found) for name, found in rates.items()], config.seeds)
    report.table(
        ["points won", *(f"seed {seed}" for seed in config.seeds), "episodes", "seconds"],
        [[name, *_won(mine)] for name, mine in methods.items()],
        "Points won on imitation are measured on the same scenes, for methods in imagination. Simulated episodes are "
        "all that were played after imitation, except the test's. Methods that share a world model count its "
        "episodes, but not the seconds of its training, except for the first.",
    )
    shown = {
        name: {seed: Rate(**rate) for seed, rate in zip(config.seeds, found, strict=True)}
        for name, found in rates.items()
    }
    report.bars("Test success", seed_bars(shown, "imitation"))
    report.command("vla-rl compare imagination")
    report.write(out / "report.html")


def _before(out: Path, rows: list[JsonObject], seed: int) -> JsonObject:
    """Imitation on the test scenes, where a method measured it, else on the validation scenes."""
    tested = [row["imitation"] for row in rows if row["seed"] == seed and row["imitation"]]
    if tested:
        return dict(tested[0])
    return dict(metrics.summary(_imitation(out, seed))["validation"])


def _rate(row: JsonObject) -> JsonObject:
    return {name: row[name] for name in ("success", "low", "high", "episodes")}


def _won(mine: Sequence[JsonObject]) -> list[str | int | None]:
    """Points won on every seed; mean episodes and seconds."""
    spent = (round(_mean([row[name] for row in mine])) for name in ("simulator_episodes", "seconds"))
    return [*(_points(row["gain"]) for row in mine), *spent]


def _points(gain: dict[str, float] | None) -> str | None:
    if gain is None:
        return None
    mean, low, high = (100 * gain[name] for name in ("mean", "low", "high"))
    return f"{mean:+.1f} [{low:.1f}, {high:.1f}]"


def _name(method: str) -> str:
    return method.replace("_", " ")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
