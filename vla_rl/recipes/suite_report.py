"""The page of an evaluation of a suite: the score, a table of tasks with intervals, and videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vla_rl.evaluation.report import Cell, Recording, Report, Tile, mean_text, percent
from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.json_types import JsonObject
from vla_rl.recipes.suite import Suite

PAGE = "report.html"


def write_suite_report(folder: Path, suite: Suite, results: JsonObject, episodes: Sequence[EpisodeResult]) -> Path:
    """Write the page into ``folder``; returns its path."""
    policy = results["policy"]
    report = Report(f"{policy['name']} on {suite.name}", f"Protocol `{results['protocol']}`.")
    tasks = "1 task" if len(suite.tasks) == 1 else f"{len(suite.tasks)} tasks"
    count, seeds = suite.episodes, f"{suite.episodes} seeds from {suite.first_seed}"
    tiles = []
    if "score" in results:
        tiles.append(Tile.of("success", Rate(**results["score"]), f"{tasks}, {seeds} each"))
    latency = results["latency_ms"]
    tiles.append(Tile("ms per decision", latency["mean"], percent=False, note=f"at most {latency['max']:.1f}"))
    report.tiles(tiles)
    suite.draw(report, results)
    report.section("Tasks", "95 % Wilson intervals; mean returns with 95 % intervals from 64 episodes on.")
    header = ["task", "success", "mean return", "mean length", "ends"]
    report.table(header, [_row(name, task) for name, task in results["tasks"].items()], f"{count} episodes each.")
    for name, said in results.get("remarks", {}).items():
        report.text(f"{name}: {' '.join(said)}")
    shown = suite.shown(results)
    if films := [_film(folder, one) for one in episodes if one.video and one.task in shown]:
        report.videos("Videos", films)
    report.section("Versions", ", ".join(f"{name} {version}" for name, version in results["versions"].items()))
    report.text(f"Policy: `{policy['name']}`, SHA-256 `{policy['sha256'] or 'none'}`, on {policy['device']}.")
    return report.write(folder / PAGE)


def _film(folder: Path, episode: EpisodeResult) -> Recording:
    label = f"{episode.task}, seed {episode.seed}: {episode.cause.replace('_', ' ')}"
    return Recording(folder / episode.video, label, episode.success)


def _row(name: str, task: JsonObject) -> list[Cell]:
    ends = ", ".join(f"{cause.replace('_', ' ')} {count}" for cause, count in task["causes"].items())
    earned = task["returns"]
    mean = mean_text(earned["mean"], earned["low"], earned["high"])
    rate = percent(Rate(*(task[key] for key in ("success", "low", "high", "episodes")))) if "success" in task else None
    return [name, rate, mean, round(task["mean_length"], 1), ends]
