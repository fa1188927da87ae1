"""The page of a comparison: which method is better when, and which is worse than the policy that all start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vla_rl.evaluation.report import Bar, Report, Series, across_seeds
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.json_types import JsonMapping

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
