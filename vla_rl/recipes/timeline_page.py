"""``timeline.html`` of a run: what each of its processes did when, and what the run waits for."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from vla_rl.evaluation.lanes import Kind, Lane
from vla_rl.evaluation.report import Cell, Report, Series
from vla_rl.experience.spans import KINDS, OWN, Span
from vla_rl.recipes.bottleneck import Arguments, bottleneck
from vla_rl.training.timeline import Timeline
from vla_rl.training.tracking import RunFolder, write_text

_COLOURS = {"simulating": 1, "learning": 2, "inferring": 3, "syncing": 4, "validating": 5, "saving": 6, "waiting": 0}
_KINDS = [Kind(kind, _COLOURS[kind]) for kind in KINDS]
_VALIDATING = KINDS.index("validating")
_ABOUT = """Waiting: the learner for a rollout, a collector for new weights and for its rollout to be taken. Syncing: \
reading actions from the policy's device, and publishing weights. Saving: metrics, checkpoints and states. What is \
blank, and "other" in the table, is none of these: making tensors of a rollout, for instance. A collector's spans \
arrive with its rollout, so those of a rollout that has not been delivered are missing at the right edge."""


class TimelinePage:
    """Holds the timeline of the run in ``folder``, and writes ``timeline.json`` and ``timeline.html`` there.

    A resumed run continues what ``timeline.json`` holds: time goes on where it stopped, iterations that are repeated
    replace the earlier ones, and those of which a killed run had not written the spans are missing.
    """

    def __init__(self, folder: RunFolder, arguments: Arguments) -> None:
        """Raises UserError for a damaged ``timeline.json`` of a run that is resumed."""
        self._folder, self._arguments = folder.path, arguments
        self.timeline = Timeline(folder.elapsed)
        saved = folder.path / "timeline.json"
        if folder.resumed and saved.exists():
            self.timeline.restore(saved.read_text(encoding="utf-8"))

    def write(self) -> Path | None:
        """Write both files; None for a run that has recorded no iteration, of which nothing is to be kept."""
        if not (self.timeline.periods and (self._folder / "metrics.jsonl").exists()):
            return None
        write_text(self._folder / "timeline.json", json.dumps(self.timeline.to_json()))
        return report_of(self.timeline, self._arguments, self._folder.name).write(self._folder / "timeline.html")


def report_of(timeline: Timeline, arguments: Arguments, name: str) -> Report:
    """The page of ``timeline``, of the run ``name``."""
    shares = shares_of(timeline)
    report = Report(f"Where the time goes: {name}", bottleneck(shares, arguments))
    number, *window = closest(timeline)
    lanes = _lanes(timeline)
    if window:
        report.lanes(f"Iteration {number:.0f}", _KINDS, lanes, *window)
    first, last = min(timeline.recent), max(timeline.recent)
    if (whole := _extent(timeline, first, last)) and first < last:
        report.lanes(f"Iterations {first} to {last}", _KINDS, lanes, *whole)
    report.section("Shares of the wall time")
    kinds = [kind for kind in KINDS if any(kind in seconds for seconds in shares.values())]
    rows: list[list[Cell]] = [
        [_shown(lane), *(f"{found.get(kind, 0.0):.1%}" for kind in kinds), f"{1 - sum(found.values()):.1%}"]
        for lane, found in shares.items()
    ]
    report.table(["process", *kinds, "other"], rows, f"Of the {_wall(timeline):.1f} s of all iterations. {_ABOUT}")
    _trend(report, timeline, kinds)
    return report


def shares_of(timeline: Timeline) -> dict[str, dict[str, float]]:
    """The share of the wall time of all iterations that each kind took in each lane, the learner's first."""
    wall = _wall(timeline)
    lanes = sorted({lane for period in timeline.periods for lane in period.seconds} | {OWN}, key=_order)
    return {
        lane: {
            kind: seconds / wall
            for kind in KINDS
            if (seconds := sum(p.seconds.get(lane, {}).get(kind, 0.0) for p in timeline.periods))
        }
        for lane in lanes
    }


def closest(timeline: Timeline) -> tuple[float, ...]:
    """(number, start, stop) of an iteration to look at closely: the last but one of those that did not validate.

    What others did during it has been delivered since.  () without any iteration.
    """
    plain = [
        number
        for number, lanes in timeline.recent.items()
        if all(kind != _VALIDATING for kind, _, _ in lanes.get(OWN, [])) and _extent(timeline, number, number)
    ]
    followed = [number for number in timeline.recent if number + 1 in timeline.recent]
    chosen = ([n for n in plain if n in followed] or plain or followed or [max(timeline.recent)])[-1]
    extent = _extent(timeline, chosen, chosen)
    return (chosen, *extent) if extent else (chosen,)


def _extent(timeline: Timeline, first: int, last: int) -> tuple[float, float] | None:
    """From the learner's first to its last span in these iterations."""
    spans = [span for n, lanes in timeline.recent.items() if first <= n <= last for span in lanes.get(OWN, [])]
    return (spans[0][1], spans[-1][2]) if spans else None


def _lanes(timeline: Timeline) -> list[Lane]:
    names = sorted({lane for lanes in timeline.recent.values() for lane in lanes}, key=_order)
    found: dict[str, list[Span]] = {
        name: list(chain.from_iterable(lanes.get(name, []) for lanes in timeline.recent.values())) for name in names
    }
    return [Lane(_shown(name), spans) for name, spans in found.items()]


def _order(lane: str) -> tuple[int, str]:
    return len(lane), lane  # collector 2 before collector 10, and the learner, which has no name, first


def _shown(lane: str) -> str:
    return lane or "learner"


def _wall(timeline: Timeline) -> float:
    return sum(period.stop - period.start for period in timeline.periods) or 1e-9


def _trend(report: Report, timeline: Timeline, kinds: list[str]) -> None:
    """What the learner did in an iteration, over the run."""
    periods = [period for period in timeline.periods if period.first]
    if len(periods) < 2:
        return
    lines = [
        Series(
            kind,
            [period.last for period in periods],
            [period.seconds.get(OWN, {}).get(kind, 0.0) / (period.last - period.first + 1) for period in periods],
            colour=_KINDS[KINDS.index(kind)].css,
        )
        for kind in kinds
        if any(kind in period.seconds.get(OWN, {}) for period in periods)
    ]
    report.section("Over the run")
    report.curves("The learner's seconds per iteration", "iteration", "seconds", lines)
