"""The whole episodes of a fleet's ledger as a LeRobotDataset v3.0."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import Recording, move_aside
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.fleet.episodes import EpisodeReader, FleetEpisode
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import FleetRecord
from vla_rl.fleet.server import LEDGER, part_of_fleet
from vla_rl.recipes.terminal import bar

_BATCH = 256  # records that are read at a time
_NAMED = 20  # episodes that are named


@dataclass(frozen=True)
class ExportSummary:
    """What became of a ledger's episodes: how many are in the dataset, with how many steps, and how many are not.

    ``aside``: by name, those whose content could not be used, and why.
    """

    episodes: int
    steps: int
    left_out: Counter[str]
    aside: tuple[str, ...] = ()

    def __str__(self) -> str:
        left = ", ".join(f"{count} {why}" for why, count in self.left_out.most_common())
        told = f"{self.episodes} episodes, {self.steps} control steps" + (f"; left out: {left}" if left else "")
        more = len(self.aside) - _NAMED
        named = [*self.aside[:_NAMED], *([f"and {more} more"] if more > 0 else [])]
        return "\n".join([told, *named])


def records(ledger: Ledger) -> Iterator[tuple[int, FleetRecord]]:
    """All records with their positions, as many as there are now."""
    after = 0
    while True:
        try:
            found = ledger.read(after, _BATCH)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            time.sleep(1.0)  # again while the disk cannot, which the ledger bounds
            continue
        if not found:
            return
        yield from found
        after = found[-1][0]


def demonstrations_of(episode: FleetEpisode) -> Demonstrations:
    """The episode as it would have been recorded on the robot itself, with the robot's name."""
    steps, spec, count = episode.steps, episode.spec, len(episode.steps)
    images = {name: np.stack([step.images[name] for step in steps]) for name in spec.images}
    seen = Observation(images, np.stack([step.state for step in steps]), *np.zeros((2, count), np.int64))
    action = np.stack([step.action for step in steps])
    labels = {name: np.stack([step.labels[name] for step in steps]) for name in steps[0].labels}
    labels["complementary_info.robot"] = np.full(count, episode.sender.robot)
    made = Demonstrations.of_episode(spec, seen, action, episode.end.success, extras=labels)
    return replace(made, tasks=(episode.task,))


def export(folder: Path, out: Path, show: Callable[[str], None]) -> ExportSummary:
    """Write what the fleet of ``folder`` has recorded to ``out``; a dataset that is there is moved aside.

    The columns are those that most robots record; episodes with others are left out and named.  Raises UserError when
    the server has the ledger open, and when there is no whole episode.
    """
    with closing(Ledger(part_of_fleet(folder, LEDGER))) as ledger:
        move_aside(out, show)
        return _written(ledger, out)


def _written(ledger: Ledger, out: Path) -> ExportSummary:
    aside: list[str] = []

    def tell(robot: str, episode: str, why: str) -> None:
        aside.append(f"left out: episode {episode or '-'} of robot {robot}: {why}")

    reader, episodes, steps, chosen = EpisodeReader(tell), 0, 0, _most_common(ledger)
    with Recording(out) as recording, bar("export", ledger.position) as update:
        for position, record in records(ledger):
            whole = reader.add(record)
            if whole is not None and columns_of(whole) != chosen:
                reader.left_out["of other columns"] += 1
                tell(whole.sender.robot, whole.name, "it has other cameras, joints or labels than most robots record")
            elif whole is not None:
                recording.add(demonstrations_of(whole))
                episodes, steps = episodes + 1, steps + len(whole.steps)
            update(position, f"{episodes} episodes")
    if not episodes:
        raise UserError(f"the ledger in {str(ledger.folder)!r} has no whole episode, so there is no dataset yet.")
    return ExportSummary(episodes, steps, reader.left_out, tuple(aside))


def columns_of(episode: FleetEpisode) -> Hashable:
    """What episodes of one dataset have in common."""
    spec, first = episode.spec, episode.steps[0]
    labels = tuple(sorted((name, str(value.dtype), value.shape) for name, value in first.labels.items()))
    images = tuple((name, item.shape) for name, item in sorted(spec.images.items()))
    names = (spec.state.names, spec.action.names)
    return (images, spec.state.shape, spec.action.shape, names, spec.control_dt, labels)


def _most_common(ledger: Ledger) -> Hashable:
    """The columns that most robots record, of those the ones that came first; one robot cannot choose for all."""
    reader, robots = EpisodeReader(lambda *_: None), dict[Hashable, set[str]]()
    for _, record in records(ledger):
        if (whole := reader.add(record)) is not None:
            robots.setdefault(columns_of(whole), set()).add(record.robot)
    return max(robots, key=lambda columns: len(robots[columns]), default=None)
