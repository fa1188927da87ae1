"""The page of a study of few episodes: what a perfect model adds to the best residual alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.evaluation.axes import interval
from vla_rl.evaluation.report import Report, Series
from vla_rl.evaluation.stats import Difference, Rate

if TYPE_CHECKING:
    from vla_rl.recipes.few.study import Curve


def write_page(path: Path, curves: Sequence[Curve], alone: Sequence[str], learnt: Sequence[str], worth: float) -> None:
    """``alone`` are residuals without more, ``learnt`` have what can be learnt, all others the simulator as a model.

    ``worth``: the gain from which a use is worth building.
    """
    report = Report(
        "A few hundred real episodes", "What a residual learns from them, and what a perfect model could add to that"
    )
    for task in dict.fromkeys(curve.task for curve in curves):
        mine = [curve for curve in curves if curve.task == task]
        best = best_of([curve for curve in mine if curve.method in alone])
        report.section(task.capitalize())
        report.table(*_success(mine))
        if uses := [curve for curve in mine if curve.method not in (*alone, *learnt)]:
            report.table(*_oracle(uses, best, worth))
        if known := [curve for curve in mine if curve.method in learnt]:
            report.table(*_learnt(known, best))
        report.curves(f"{task}: test success", "real episodes", "success", [_series(one) for one in mine], percent=True)
    report.command("vla-rl few")
    report.write(path)


def best_of(curves: Sequence[Curve]) -> Curve:
    """The one with the largest area under its curve."""
    return max(curves, key=lambda curve: curve.area())


def _success(curves: Sequence[Curve]) -> tuple[list[str], list[list[str]], str]:
    header = ["real episodes", *map(str, curves[0].episodes), "while learning", "lowest"]
    rows = [[_name(curve), *_at_milestones(curve), f"{curve.area():.1%}", _points(curve.lowest())] for curve in curves]
    scenes = len(next(iter(curves[0].outcomes.values()))[0])
    caption = (
        f"Success on the same {scenes} test scenes: mean of the seeds (lowest to highest). While learning: the area "
        "under the curve. Lowest: of any seed at any milestone, in points above its base."
    )
    return header, rows, caption


def _at_milestones(curve: Curve) -> list[str]:
    found = curve.success()
    return [f"{one.mean():.1%} ({100 * one.min():.0f} to {100 * one.max():.0f})" for one in found.T]


def _oracle(uses: Sequence[Curve], best: Curve, worth: float) -> tuple[list[str], list[list[str]], str]:
    rows = []
    for curve in uses:
        most = max(curve.area() - best.area(), *(one.mean for one in _gains(curve, best)))
        rows.append([*_gain_cells(curve, best), "yes" if most >= worth else "no"])
    caption = (
        f"Points gained over the best residual alone ({_name(best)}) on the same scenes, with the 95 % interval of "
        f"all scenes of all seeds (Tango's). Worth it: {100 * worth:g} points or more somewhere; no learnt model could "
        "do better."
    )
    return [*_gain_header("the simulator as the model", best), "worth it"], rows, caption


def _learnt(uses: Sequence[Curve], best: Curve) -> tuple[list[str], list[list[str]], str]:
    rows = [_gain_cells(curve, best) for curve in uses]
    caption = "Points gained by what is learnt from the same episodes, as above."
    return _gain_header("learnt", best), rows, caption


def _gain_header(what: str, best: Curve) -> list[str]:
    return [what, *map(str, best.episodes[1:]), "while learning"]


def _gains(curve: Curve, best: Curve) -> list[Difference]:
    return [curve.gain(best, milestone) for milestone in range(1, len(best.episodes))]


def _gain_cells(curve: Curve, best: Curve) -> list[str]:
    cells = [f"{_points(one.mean)} {interval(one.low, one.high, percent=True)}" for one in _gains(curve, best)]
    return [_name(curve), *cells, _points(curve.area() - best.area())]


def _series(curve: Curve) -> Series:
    """The mean of the seeds, with Wilson's interval of all their scenes."""
    pooled = [
        Rate.of(np.concatenate([found[milestone] for found in curve.outcomes.values()]))
        for milestone in range(len(curve.episodes))
    ]
    bounds = [rate.success for rate in pooled], [rate.low for rate in pooled], [rate.high for rate in pooled]
    return Series(_name(curve), list(curve.episodes), *bounds)


def _name(curve: Curve) -> str:
    return curve.method.replace("_", " ")


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}"
