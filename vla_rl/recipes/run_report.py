"""The page of a run whose recipe writes none of its own: results, settings and every metric."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vla_rl.contract.config import to_json
from vla_rl.evaluation.report import Report, Series, Tile
from vla_rl.recipes import metrics
from vla_rl.recipes.json_types import JsonObject
from vla_rl.training.tracking import RunFolder

_POINTS = 300  # of a curve
_SECTIONS = ("eval", "rollout", "policy", "critic", "replay", "env", "time", "")
_CLOCKS = ("stage", "step", "elapsed_s", "env/steps_total")
_SCORE, _BAND = "eval/score", ("eval/score_low", "eval/score_high")
# What a summary calls its results, and the episodes that they are of.
_RESULTS = {
    "imitation": ("imitation", "test episodes"),
    "validation": ("imitation", "validation episodes"),
    "rl": ("after RL", "test episodes"),
    "return": ("mean return after RL", "test episodes"),
}
_TITLES = {
    "eval": "Validation",
    "rollout": "Exploration",
    "policy": "Policy",
    "critic": "Critic",
    "replay": "Replay buffer",
    "env": "Environment",
    "time": "Seconds per iteration",
    "": "Training",
}


def write_run_report(folder: RunFolder, summary: JsonObject) -> Path:
    """Write ``report.html`` into the run folder, unless the recipe has done so; returns its path."""
    path = folder.path / "report.html"
    if path.exists():
        return path
    about = (type(folder.config).__doc__ or "").strip().partition("\n")[0]
    report, lines = Report(folder.path.name, about), metrics.rows(folder.path)
    percent = any("success" in item for item in summary.values() if isinstance(item, dict))
    if tiles := [*_before(lines, percent), *_tiles(summary)]:
        report.tiles(tiles)
    seconds = summary.get("seconds", {})
    report.table(["stage", "seconds"], [[stage, round(value, 1)] for stage, value in seconds.items()])
    for stage in dict.fromkeys(line["stage"] for line in lines):
        _curves(report, stage, [line for line in lines if line["stage"] == stage], percent)
    report.section("Settings", "As in `config.json`.")
    report.table(["field", "value"], [list(row) for row in _flat(to_json(folder.config))])
    report.command(f"vla-rl inspect {folder.path}")
    return report.write(path)


def _before(lines: list[JsonObject], percent: bool) -> Iterator[Tile]:
    """The first validation, beside which the results are seen; none where that was all."""
    scored = [line for line in lines if line.get(_SCORE) is not None]
    if len(scored) > 1:
        first = scored[0]
        note = f"{first['eval/episodes']:.0f} validation episodes" if "eval/episodes" in first else "validation"
        low, high = (first.get(name) for name in _BAND)
        yield Tile("before", first[_SCORE], low, high, percent=percent, note=note)


def _tiles(summary: JsonObject) -> Iterator[Tile]:
    """Every rate and mean return in the summary."""
    for name, item in summary.items():
        if not isinstance(item, dict) or not {"low", "high", "episodes"} <= item.keys():
            continue
        what, note = _RESULTS.get(name, (name, "episodes"))
        note = f"{item['episodes']} {note}"
        if "success" in item:
            yield Tile(what, item["success"], item["low"], item["high"], note=note)
        elif "mean" in item:
            yield Tile(what, item["mean"], item["low"], item["high"], percent=False, note=note)


def _curves(report: Report, stage: str, lines: list[JsonObject], percent: bool) -> None:
    """A chart for every metric of one stage that changes, over control steps where they are counted.

    The score has its interval as a band; what never changes is one line of text.
    """
    clock, label = ("env/steps_total", "control steps") if "env/steps_total" in lines[-1] else ("step", "step")
    names = dict.fromkeys(name for line in lines for name in line if name not in _CLOCKS)
    for section in _SECTIONS:
        chosen = [name for name in names if name.rpartition("/")[0].partition("/")[0] == section and name not in _BAND]
        if chosen:
            report.section(f"{_TITLES[section]} ({stage})")
        values = {name: {line[name] for line in lines if line.get(name) is not None} for name in chosen}
        for name in (name for name in chosen if len(values[name]) > 1):
            known = thinned([line for line in lines if line.get(name) is not None and clock in line])
            banded = name == _SCORE and all(line.get(item) is not None for line in known for item in _BAND)
            low, high = ([line[item] for line in known] if banded else None for item in _BAND)
            points = Series(stage, [line[clock] for line in known], [line[name] for line in known], low, high)
            report.curves(name, label, name.rpartition("/")[2], [points], percent and name == _SCORE)
        same = [f"`{name}` {next(iter(values[name])):.4g}" for name in chosen if len(values[name]) == 1]
        report.text(f"The same throughout: {', '.join(same)}." if same else "")


def thinned(lines: list[JsonObject]) -> list[JsonObject]:
    """At most ``_POINTS`` of ``lines`` at equal distances, the first and the last among them."""
    chosen = np.linspace(0, len(lines) - 1, min(len(lines), _POINTS)).round().astype(int)
    return [lines[i] for i in chosen]


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, value) of everything in a config's JSON."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}".lstrip("."))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
