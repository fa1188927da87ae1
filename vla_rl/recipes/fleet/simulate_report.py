"""The page of fleets in virtual time: success and the person's share over virtual time, by number of robots."""

from __future__ import annotations

from vla_rl.evaluation.report import Cell, Report, Series, Tile, percent
from vla_rl.evaluation.stats import Rate
from vla_rl.recipes.json_types import JsonObject
from vla_rl.training.tracking import RunFolder

_COLUMNS = ("robots", "success, test", "time to {target:.0%}", "person's steps", "of all", "episodes", "lost")


def write_report(folder: RunFolder, summary: JsonObject, target: float) -> None:
    """Write ``report.html`` from the ``summary`` and the metrics of the run."""
    report = Report("A fleet in virtual time", "What robots, a person and one learner would achieve together.")
    before = Rate(**summary["before"])
    tiles = [Tile.of("before", before, f"{before.episodes} test episodes")]
    rows: list[list[Cell]] = []
    success, share = [], []
    for robots, found in summary["fleets"].items():
        rate, name = Rate(**found["test"]), f"{robots} robots"
        tiles.append(Tile.of(name, rate, f"{rate.episodes} test episodes"))
        reached = found["seconds_to_target"]
        when = "not reached" if reached is None else f"{reached:.0f} s"
        counts: list[Cell] = [found["person"], f"{found['share']:.1%}", found["episodes"], found["lost"]]
        rows.append([int(robots), percent(rate), when, *counts])
        lines = folder.metrics(f"robots-{robots}")
        seconds = [line["step"] for line in lines]
        bounds = ([line[f"eval/{end}"] for line in lines] for end in ("low", "high"))
        success.append(Series(name, seconds, [line["eval/success"] for line in lines], next(bounds), next(bounds)))
        share.append(Series(name, seconds, [line["fleet/person_share"] for line in lines]))
    report.tiles(tiles)
    report.table([column.format(target=target) for column in _COLUMNS], rows)
    report.curves("Success on validation seeds", "virtual seconds", "success", success, percent=True)
    report.curves("The person's share of all control steps so far", "virtual seconds", "share", share, percent=True)
    report.command(f"vla-rl inspect {folder.path}")
    report.write(folder.path / "report.html")
