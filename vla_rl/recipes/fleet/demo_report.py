"""The page of a fleet on one machine: what robots did alone, what people did, which versions there were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from vla_rl.contract.errors import ContractError
from vla_rl.evaluation.report import Cell, Clip, Report, Series, Tile, percent
from vla_rl.evaluation.stats import Rate
from vla_rl.fleet.episode_end import EpisodeEnd
from vla_rl.fleet.episodes import EpisodeReader, FleetEpisode
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.registry import Registry
from vla_rl.recipes.fleet.export import records
from vla_rl.recipes.json_types import JsonMapping
from vla_rl.training.tracking import RunFolder

WINDOW = 60  # episodes that a point of a curve is of
_RESCUED, _ALONE = 2, 3  # clips: a row
_FRAME, _PERSONS = 2, (255, 160, 0)  # pixels around a picture in which a person acts, and their colour


@dataclass(frozen=True)
class Played:
    """An episode that the ledger holds the end of, at ``position``."""

    position: int
    robot: str
    version: int
    end: EpisodeEnd

    @property
    def alone(self) -> bool:
        """Whether the robot succeeded without a person."""
        return self.end.success and not self.end.intervened


def write_report(folder: RunFolder, summary: JsonMapping, ledger: Ledger, registry: Registry) -> None:
    """Write ``report.html`` from the ``summary`` and what the fleet's ``ledger`` and ``registry`` hold."""
    played = list(played_in(ledger))
    before, after = Rate(**summary["imitation"]), Rate(**summary["fleet"])
    report = Report(
        f"{before.success:.0%} by imitation, {after.success:.0%} after the fleet's practice",
        f"{len(summary['robots'])} simulated arms, scripted people who correct them, one server, one learner, one "
        "machine",
    )
    share = summary["intervened"] / max(1, summary["steps"])
    tested = f"{before.episodes} test scenes, alone"
    report.tiles(
        [
            Tile.of("Imitation", before, tested),
            Tile.of("After the fleet's practice", after, tested, "good"),
            Tile("People's share of the control steps", share, note=f"of {summary['steps']:,}"),
        ]
    )
    report.text(
        f"Robots played {summary['episodes']:,} episodes, each with the version that the server wanted. A person "
        f"who saw one fail took over, and the learner imitated what the person did: {summary['learner']['updates']:,} "
        f"updates. The server acknowledged {summary['records']:,} records, each after it was on its disk. Both "
        "policies were then tried on the same scenes, which nothing was learnt from. Intervals are 95 %, of each "
        "policy by itself."
    )
    _curves(report, played)
    _tables(report, summary, played, registry)
    _clips(report, ledger, played)
    report.command(f"vla-rl fleet demo --seed {summary['seed']}")
    report.write(folder.path / "report.html")


def played_in(ledger: Ledger) -> Iterator[Played]:
    """All episodes whose ends can be read, in the order in which the server got those."""
    for position, record in records(ledger):
        if record.kind == "episode_end":
            try:
                end = EpisodeEnd.from_payload(record.payload)
            except ContractError:  # the server's page named it
                continue
            yield Played(position, record.robot, record.policy_version, end)


def windows(played: Sequence[Played], size: int) -> Iterator[tuple[int, Rate, float]]:
    """For every ``size`` episodes in a row: how many there were by then, success alone, people's share of the steps.

    They overlap by three quarters.
    """
    step = max(1, size // 4)
    for end in range(min(size, len(played)), len(played) + 1, step):
        some = played[max(0, end - size) : end]
        steps = sum(one.end.steps for one in some)
        yield end, Rate.of([one.alone for one in some]), sum(one.end.intervened for one in some) / max(1, steps)


def _curves(report: Report, played: Sequence[Played]) -> None:
    if not played:
        return
    ends, rates, shares = zip(*windows(played, WINDOW), strict=True)
    low, high = ([getattr(rate, bound) for rate in rates] for bound in ("low", "high"))
    report.section("While the robots practised", f"Each point is of {WINDOW} episodes in a row, of all robots.")
    alone = Series("all robots", ends, [rate.success for rate in rates], low, high)
    report.curves("Success without a person", "episodes", "success", [alone], percent=True)
    report.curves("People's share of the control steps", "episodes", "share", [Series("", ends, shares)], percent=True)


def _tables(report: Report, summary: JsonMapping, played: Sequence[Played], registry: Registry) -> None:
    report.section("Versions", "Success without a person. A new version is tried by some robots before all have it.")
    stages = registry.releases.stages
    rows: list[list[Cell]] = []
    for version in sorted({*stages, *(one.version for one in played)}):
        some = [one for one in played if one.version == version]
        rate = percent(Rate.of([one.alone for one in some])) if some else None
        rows.append([version, stages.get(version, "unknown"), len(some), rate])
    report.table(["version", "in the end", "episodes", "success alone"], rows)
    report.section("Robots")
    robots: list[list[Cell]] = []
    for name, one in summary["robots"].items():
        own = [item for item in played if item.robot == name]
        rate = percent(Rate.of([item.alone for item in own])) if own else None
        robots.append([name, len(own), rate, f"{one['intervened'] / max(1, one['steps']):.1%}", one["records"]])
    report.table(["robot", "episodes", "success alone", "a person's steps", "records stored"], robots)
    for sentence in summary["alarms"]:
        report.text(f"Alarm: {sentence}")


def _clips(report: Report, ledger: Ledger, played: Sequence[Played]) -> None:
    rescued = [one for one in played if one.end.success and one.end.intervened]
    alone = [one for one in reversed(played) if one.alone]
    chosen = {one.position: one for one in (*islice(rescued, _RESCUED), *islice(alone, _ALONE))}
    reader, clips = EpisodeReader(), list[Clip]()
    for position, record in records(ledger):
        if position not in chosen:
            (reader.skip if record.kind == "episode_end" else reader.add)(record)
        elif (episode := reader.add(record)) is not None and episode.spec.images:
            clips.append(_clip(episode, chosen[position]))
    if clips:
        report.section("Episodes", "Orange frame: a person has control.")
        report.videos("", clips)


def _clip(episode: FleetEpisode, one: Played) -> Clip:
    """What the first camera saw."""
    camera = next(iter(episode.spec.images))
    frames = np.stack([np.repeat(one, 3 // one.shape[2], 2) for one in (step.images[camera] for step in episode.steps)])
    person = np.array(episode.intervened)
    for rows in (np.s_[:_FRAME], np.s_[-_FRAME:]):
        frames[person, rows] = _PERSONS
        frames[person, :, rows] = _PERSONS
    who = f"a person in {person.mean():.0%}" if person.any() else "alone"
    return Clip(frames, f"{one.robot}, version {one.version}, {who}", one.end.success, 1 / episode.spec.control_dt)
