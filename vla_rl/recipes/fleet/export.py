"""The whole episodes of a fleet's ledger as a LeRobotDataset v3.0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.datasets import move_aside
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.translate import Recording
from vla_rl.fleet.episodes import EpisodeReader, FleetEpisode
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import FleetRecord
from vla_rl.fleet.server import LEDGER
from vla_rl.recipes.progress import bar

_BATCH = 256  # records that are read at a time


@dataclass(frozen=True)
class ExportSummary:
    """What became of a ledger's episodes: how many are in the dataset, with how many steps, and how many are not."""

    episodes: int
    steps: int
    left_out: Counter[str]

    def __str__(self) -> str:
        left = ", ".join(f"{count} {why}" for why, count in self.left_out.most_common())
        return f"{self.episodes} episodes, {self.steps} control steps" + (f"; left out: {left}" if left else "")


def records(ledger: Ledger, after: int = 0) -> Iterator[tuple[int, FleetRecord]]:
    """All records behind position ``after``, as many as there are now."""
    while found := ledger.read(after, _BATCH):
        yield from found
        after = found[-1][0]


def demonstrations_of(episode: FleetEpisode) -> Demonstrations:
    """The episode as it would have been recorded on the robot itself, with the robot's name."""
    steps, spec = episode.steps, episode.spec
    count, success = len(steps), episode.end.success
    last = np.arange(count) == count - 1
    labels = {name: np.stack([step.labels[name] for step in steps]) for name in steps[0].labels}
    return Demonstrations(
        images={name: np.stack([step.images[name] for step in steps]) for name in spec.images},
        state=np.stack([step.state for step in steps]),
        task=np.zeros(count, np.int64),
        time=np.arange(count),
        action=np.stack([step.action for step in steps]),
        episode=np.zeros(count, np.int64),
        seed=np.full(count, -1, np.int64),
        tasks=(episode.task,),
        fps=1.0 / spec.control_dt,
        state_names=spec.state.names,
        action_names=spec.action.names,
        extras={
            **labels,
            "next.reward": (last & success).astype(np.float32),
            "next.done": last,
            "next.success": last & success,
            "complementary_info.robot": np.full(count, episode.sender.robot),
        },
        robot=spec.name,
    )


def export(folder: Path, out: Path, show: Callable[[str], None]) -> ExportSummary:
    """Write what the fleet of ``folder`` has recorded to ``out``; a dataset that is there is moved aside.

    Raises UserError when the server has the ledger open, when there is no whole episode, and when two robots record
    different columns.
    """
    if not (folder / LEDGER).is_dir():
        raise UserError(f"{str(folder)!r} is no fleet's folder: it has no {LEDGER}; give the one of vla-rl serve.")
    ledger = Ledger(folder / LEDGER)
    try:
        aside = move_aside(out)
        if aside:
            show(f"an earlier dataset was in {out}; it is now {aside}")
        return _written(ledger, out)
    finally:
        ledger.close()


def _written(ledger: Ledger, out: Path) -> ExportSummary:
    reader, episodes, steps = EpisodeReader(), 0, 0
    with Recording(out) as recording, bar("export", ledger.position) as update:
        for position, record in records(ledger):
            whole = reader.add(record)
            if whole is not None:
                _add(recording, whole)
                episodes, steps = episodes + 1, steps + len(whole.steps)
            update(position, f"{episodes} episodes")
    if not episodes:
        raise UserError(f"the ledger in {str(ledger.folder)!r} has no whole episode, so there is no dataset yet.")
    return ExportSummary(episodes, steps, reader.left_out)


def _add(recording: Recording, episode: FleetEpisode) -> None:
    try:
        recording.add(demonstrations_of(episode))
    except (ContractError, KeyError, ValueError) as error:
        raise UserError(
            f"episode {episode.name} of robot {episode.sender.robot!r} has other columns than those before "
            f"({error}), so the export ends here; robots of one dataset need the same cameras, joints and labels."
        ) from error
