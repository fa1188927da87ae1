"""Perturbation suites: one environment at many values of its parameters, all on the same seeds.

A point is a policy's episodes with one value of every parameter, on the same seeds as all other points.  The worst case
and the mean over a grid are what robust reinforcement learning reports (RRLS, arXiv 2406.08406).  The lowest of many
estimates is too low on average, so the worst point is chosen by the first half of the episodes and its score is that of
the second half.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Literal, TypeAlias

import numpy as np

from vla_rl.contract.config import JsonObject
from vla_rl.contract.errors import ContractError
from vla_rl.contract.task import Choice, Parameter, Randomization
from vla_rl.evaluation.report import Report, Series, mean_text
from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.stats import MeanReturn, Rate
from vla_rl.recipes import sims
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.suite import Suite, SuiteTask

NOMINAL = "nominal"  # the task in which no parameter is varied
Rule = Literal["once", "at_end"] | None
Point = tuple[tuple[str, float], ...]
Score: TypeAlias = Rate | MeanReturn


@dataclass(frozen=True)
class PerturbedEpisodes:
    """The episodes at one point.

    values   {parameter: value}; parameters that are not named are nominal
    outcome  [n]  bool success, or float return where the environment has no success, in the order of the seeds
    """

    values: Mapping[str, float]
    outcome: np.ndarray

    @property
    def score(self) -> Score:
        """Success rate or mean return with its interval."""
        return _score(self.outcome)


@dataclass(frozen=True)
class WorstCase:
    """The worst of ``points`` points.

    values   of the worst point by the first half of its episodes
    score    of that point in the second half, which had no part in choosing it
    mean     of the scores of all points, all episodes
    ties     other points that were as bad in the first half
    """

    values: Mapping[str, float]
    score: Score
    mean: float
    points: int
    ties: int


def curves(points: Sequence[PerturbedEpisodes], varied: Sequence[Parameter]) -> dict[str, list[tuple[float, Score]]]:
    """For each of ``varied`` value and score of the points that differ from nominal in nothing else, by value.

    Parameters without two such points have no curve.
    """
    found = {}
    for parameter in varied:
        others = [other for other in varied if other.name != parameter.name]
        on_axis = [
            (point.values.get(parameter.name, parameter.nominal), point.score)
            for point in points
            if all(point.values.get(other.name, other.nominal) == other.nominal for other in others)
        ]
        if len(on_axis) > 1:
            found[parameter.name] = sorted(on_axis, key=itemgetter(0))
    return found


def worst_case(points: Sequence[PerturbedEpisodes]) -> WorstCase:
    """The worst of ``points``; raises ContractError unless all have the same number of episodes, at least 2."""
    lengths = {len(point.outcome) for point in points}
    if len(lengths) != 1 or min(lengths) < 2:
        raise ContractError(
            f"the points have {sorted(lengths)} episodes, so no worst one can be chosen by half of them; play the same "
            "seeds, at least 2, at every point."
        )
    half = lengths.pop() // 2
    first = [float(point.outcome[:half].mean()) for point in points]
    worst = points[int(np.argmin(first))]
    mean = float(np.mean([point.score.score for point in points]))
    return WorstCase(worst.values, _score(worst.outcome[half:]), mean, len(points), first.count(min(first)) - 1)


def _score(outcome: np.ndarray) -> Score:
    return Rate.of(outcome) if outcome.dtype == np.bool_ else MeanReturn.of(outcome)


@dataclass(frozen=True)
class PerturbationSuite(Suite):
    """A suite whose tasks are points: one environment with fixed values of some parameters.

    Beside the table of tasks its results have a curve of the score over every one of ``varied``, and the worst case
    over all points.
    """

    varied: tuple[Parameter, ...] = ()

    def analyze(self, episodes: Sequence[EpisodeResult]) -> JsonObject:
        """``perturbation``: curves {parameter: points}, and the worst case, as JSON."""
        points = [self._point(task, episodes) for task in self.tasks]
        found: JsonObject = {
            "curves": {
                name: [{"value": value, **asdict(score), "score": score.score} for value, score in items]
                for name, items in curves(points, self.varied).items()
            }
        }
        if self.episodes > 1:
            worst = worst_case(points)
            found["worst_case"] = {**asdict(worst), "score": {**asdict(worst.score), "score": worst.score.score}}
        return {"perturbation": found}

    def draw(self, report: Report, results: JsonObject) -> None:
        """A figure for every curve, and the worst case."""
        found, rated = results["perturbation"], self.tasks[0].success is not None
        label = "success" if rated else "mean return"
        if "worst_case" in found:
            worst = found["worst_case"]
            values = ", ".join(f"{name} {value:g}" for name, value in worst["values"].items()) or NOMINAL
            ends = [worst["score"][end] for end in ("score", "low", "high")]
            shown = "{:.1%} [{:.1%}, {:.1%}]".format(*ends) if rated else mean_text(*ends)
            ties = f"In the other half {worst['ties']} more points were as bad. " if worst["ties"] else ""
            report.section(
                "Worst case",
                f"Of {worst['points']} points the worst is **{values}**: {label} {shown} in "
                f"the half of the seeds that had no part in choosing it. {ties}Mean of all points: "
                f"{format(worst['mean'], '.1%' if rated else '.4g')}.",
            )
        report.section("Curves", f"The {label} while one parameter differs and all others are nominal; the same seeds.")
        for parameter in self.varied:
            if items := found["curves"].get(parameter.name):
                x, y, low, high = (  # null, where there are too few episodes, is nan
                    np.array([item[key] for item in items], float) for key in ("value", "score", "low", "high")
                )
                axis = f"{parameter.name} ({parameter.unit}), nominal {parameter.nominal:g}"
                title = f"{parameter.name}: {parameter.meaning}"
                report.curves(title, axis, label, [Series(label, x, y, low, high)], percent=rated)

    def shown(self, results: JsonObject) -> Sequence[str]:
        """Nominal and the worst point: those of all points would be hundreds."""
        worst = results["perturbation"].get("worst_case", {"values": {}})
        return [NOMINAL, _label(worst["values"].items())]

    def _point(self, task: SuiteTask, episodes: Sequence[EpisodeResult]) -> PerturbedEpisodes:
        own = [episode for episode in episodes if episode.task == task.name]
        outcome = [one.returns if task.success is None else one.success for one in own]
        return PerturbedEpisodes(task.env.options["parameters"], np.array(outcome))


def perturbation_sweep(
    name: str,
    version: int,
    env: EnvConfig,
    horizon: int,
    values: Mapping[str, Sequence[float]] | None = None,
    success: Rule = "once",
    episodes: int = 64,
) -> PerturbationSuite:
    """One parameter at a time: ``values`` {parameter: values}; without, seven of every parameter that ``env`` declares.

    Raises UserError for parameters and values that ``env`` does not allow.
    """
    declared = sims.parameters_of(env.name, env.options)
    chosen = values or {parameter.name: parameter.grid(7) for parameter in declared}
    nominal = {parameter.name: parameter.nominal for parameter in declared}
    points = [((key, value),) for key, some in chosen.items() for value in some if value != nominal.get(key)]
    return _suite(name, version, env, horizon, [(), *points], success, episodes)


def perturbation_grid(
    name: str,
    version: int,
    env: EnvConfig,
    horizon: int,
    values: Mapping[str, Sequence[float]],
    success: Rule = "once",
    episodes: int = 64,
) -> PerturbationSuite:
    """All combinations of ``values`` {parameter: values}; raises UserError as :func:`perturbation_sweep`."""
    points = [tuple(zip(values, point, strict=True)) for point in itertools.product(*values.values())]
    return _suite(name, version, env, horizon, points, success, episodes)


def _suite(
    name: str, version: int, env: EnvConfig, horizon: int, points: Sequence[Point], success: Rule, episodes: int
) -> PerturbationSuite:
    declared = sims.parameters_of(env.name, env.options)
    tasks = []
    for point in points:
        Randomization({key: Choice((value,)) for key, value in point}).check(declared, env.name)
        options: JsonObject = {"env": env.name, "options": env.options, "parameters": dict(point)}
        tasks.append(SuiteTask(_label(point), EnvConfig("randomize", options), horizon, success))
    named = {key for point in points for key, _ in point}
    varied = tuple(parameter for parameter in declared if parameter.name in named)
    return PerturbationSuite(name, version, tuple(tasks), episodes, varied=varied)


def _label(point: Iterable[tuple[str, float]]) -> str:
    """The task's name of a point."""
    return ",".join(f"{key}={value:g}" for key, value in point) or NOMINAL
