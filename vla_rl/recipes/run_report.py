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
    name = type(folder.config).__name__
    about = (type(folder.config).__doc__ or "").strip().partition("\n")[0]
    report = Report(f"{name}: {folder.path.name}", about)
    if tiles := list(_tiles(summary)):
        report.tiles(tiles)
    seconds = summary.get("seconds", {})
    report.table(["stage", "seconds"], [[stage, round(value, 1)] for stage, value in seconds.items()])
    lines = metrics.rows(folder.path)
    for stage in dict.fromkeys(line["stage"] for line in lines):
        _curves(report, stage, [line for line in lines if line["stage"] == stage])
    report.section("Settings", "As in `config.json`.")
    report.table(["field", "value"], [list(row) for row in _flat(to_json(folder.config))])
    report.command(f"vla-rl inspect {folder.path}")
    return report.write(path)


def _tiles(summary: JsonObject) -> Iterator[Tile]:
    """Every rate and mean return in the summary."""
    for name, item in summary.items():
        if not isinstance(item, dict) or not {"low", "high", "episodes"} <= item.keys():
            continue
        note = f"{item['episodes']} episodes"
        if "success" in item:
            yield Tile(name, item["success"], item["low"], item["high"], note=note)
        elif "mean" in item:
            yield Tile(name, item["mean"], item["low"], item["high"], percent=False, note=note)


def _curves(report: Report, stage: str, lines: list[JsonObject]) -> None:
    """A chart for every metric of one stage, over control steps where they are counted."""
    clock, label = ("env/steps_total", "control steps") if "env/steps_total" in lines[-1] else ("step", "step")
    names = dict.fromkeys(name for line in lines for name in line if name not in _CLOCKS)
    for section in _SECTIONS:
        chosen = [name for name in names if name.rpartition("/")[0].partition("/")[0] == section]
        if chosen:
            report.section(f"{_TITLES[section]} ({stage})")
        for name in chosen:
            known = thinned([line for line in lines if line.get(name) is not None and clock in line])
            points = Series(stage, [line[clock] for line in known], [line[name] for line in known])
            report.curves(name, label, name.rpartition("/")[2], [points])


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
