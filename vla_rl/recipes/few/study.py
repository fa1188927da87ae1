"""Every use of a model with the simulator in its place, beside residuals alone: unattended and resumable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.evaluation.stats import Difference, Rate, paired_bootstrap
from vla_rl.recipes import metrics
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.few.report import write_page
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.sweep import Cell, run_sweep
from vla_rl.recipes.workers import EngineOptions
from vla_rl.training.tracking import write_json


@dataclass(frozen=True)
class Curve:
    """One method on one task: for each seed, its successes bool [scenes] after 0 and each milestone of episodes."""

    task: str
    method: str
    episodes: tuple[int, ...]
    outcomes: Mapping[int, tuple[np.ndarray, ...]]

    def rate(self, seed: int, milestone: int) -> Rate:
        """Success of ``seed`` at number ``milestone`` of :attr:`episodes`."""
        return Rate.of(self.outcomes[seed][milestone])

    def success(self) -> np.ndarray:
        """float [seeds, milestones]."""
        return np.array([[one.mean() for one in found] for found in self.outcomes.values()])

    def area(self) -> float:
        """Mean success while learning: the area under the curve over the last of :attr:`episodes`; mean of seeds."""
        return float(np.trapezoid(self.success().mean(0), self.episodes) / self.episodes[-1])

    def lowest(self) -> float:
        """The lowest success of any seed at any milestone, less that seed's before learning."""
        found = self.success()
        return float((found - found[:, :1]).min())

    def gain(self, other: Curve, milestone: int) -> Difference:
        """Over ``other`` on the same scenes: mean of seeds, with Tango's interval of all scenes."""
        mine, theirs = (
            np.concatenate([one.outcomes[seed][milestone] for seed in self.outcomes]) for one in (self, other)
        )
        return paired_bootstrap(mine, theirs, 0, 10_000)


@dataclass(frozen=True)
class FewStudy(EngineOptions):
    """Cells are processes of their own; those whose ``summary.json`` exists are not run again.

    A name TASK_NAME is a function of ``config``, and imitate_TASK another.
    """

    tasks: tuple[str, ...] = ("lift", "place")
    alone: tuple[str, ...] = ("residual_quarter", "residual_one", "residual_four")
    uses: tuple[str, ...] = ("selection", "branches", "expansion")  # with the simulator as the model
    learnt: tuple[str, ...] = ("latent_selection", "critic_selection")  # with what is learnt from the same episodes
    config: str = "few.py"
    seeds: tuple[int, ...] = (1, 2, 3)
    processes: int = 2
    worth: float = 0.05  # gain of a perfect model over the best residual alone from which a use is worth building
    out: str = "runs/few"

    def run(self) -> list[Curve]:
        """Imitate, learn, write ``results.json`` and ``report.html``."""
        names = [f"imitate_{task}" for task in self.tasks]
        names += [f"{task}_{name}" for task in self.tasks for name in self._methods()]
        for name in names:
            load_config(f"{self.config}:{name}")  # an unknown name should be known before hours of work
        first = [self._imitation(task, seed) for task in self.tasks for seed in self.seeds]
        second = [
            self._cell(task, name, seed) for name in self._methods() for task in self.tasks for seed in self.seeds
        ]
        out = Path(self.out)
        run_sweep(out, {"imitate": first, "learn": second}, self.processes)
        curves = [self._curve(task, name) for task in self.tasks for name in self._methods()]
        write_json(out / "results.json", list(_rows(curves)))
        write_page(out / "report.html", curves, self.alone, self.learnt, self.worth)
        return curves

    def _methods(self) -> tuple[str, ...]:
        return (*self.alone, *self.uses, *self.learnt)

    def _imitation(self, task: str, seed: int) -> Cell:
        folder = Path(self.out) / task / f"imitate-{seed}"
        return Cell(folder, f"{self.config}:imitate_{task}", ("--seed", str(seed)))

    def _cell(self, task: str, name: str, seed: int) -> Cell:
        start = self._imitation(task, seed).out
        policy, demonstrations = start / "checkpoints" / "imitation", start / "demonstrations"
        given = ("--seed", str(seed), "--policy", str(policy), "--demonstrations", str(demonstrations))
        return Cell(Path(self.out) / task / f"{name}-{seed}", f"{self.config}:{task}_{name}", given)

    def _curve(self, task: str, name: str) -> Curve:
        found = {seed: metrics.summary(self._cell(task, name, seed).out)["rows"] for seed in self.seeds}
        outcomes = {seed: tuple(_outcomes(row) for row in rows) for seed, rows in found.items()}
        return Curve(task, name, tuple(int(row["episodes"]) for row in found[self.seeds[0]]), outcomes)


def _outcomes(row: JsonObject) -> np.ndarray:
    return np.array([one == "1" for one in row["outcomes"]])


def _rows(curves: list[Curve]) -> Iterator[JsonObject]:
    """``results.json``: one row for each method, budget and seed; the base's once for each seed."""
    tasks: set[str] = set()
    for curve in curves:
        for milestone, episodes in enumerate(curve.episodes):
            if episodes == 0 and curve.task in tasks:
                continue
            for seed in curve.outcomes:
                rate = curve.rate(seed, milestone)
                what = {"task": curve.task, "method": curve.method if episodes else "base", "episodes": episodes}
                yield {**what, "seed": seed, "success": rate.success, "low": rate.low, "high": rate.high}
        tasks.add(curve.task)
