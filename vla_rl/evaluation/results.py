"""The files of an evaluation: a journal that grows by an episode at a time, and the tables that are made from it.

``journal.jsonl`` has one line per episode, in the order in which they ended; a process may be killed anywhere and loses
the episodes that were still running.  ``episodes.csv`` and ``latency.csv`` are written when all episodes have ended, in
the order of the suite.  Latencies differ from run to run, so they have a file of their own: ``episodes.csv`` is the
same byte for byte, however often the evaluation was interrupted and however many environments ran side by side.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_file, write_whole

JOURNAL, EPISODES, LATENCY = "journal.jsonl", "episodes.csv", "latency.csv"
TABLES = JOURNAL, EPISODES, LATENCY
_COLUMNS = ("task", "seed", "success", "cause", "length", "return", "video")
_LATENCY_COLUMNS = ("task", "seed", "decisions", "mean_ms", "max_ms")


@dataclass(frozen=True)
class EpisodeResult:
    """One episode of an evaluation.

    ``length`` is in low-level actions, ``returns`` the undiscounted sum of rewards, ``video`` a file of the results'
    folder or "".  ``mean_ms`` and ``max_ms`` are the policy's time for one of its ``decisions``.
    """

    task: str
    seed: int
    success: bool
    cause: str
    length: int
    returns: float
    video: str
    decisions: int
    mean_ms: float
    max_ms: float

    @property
    def key(self) -> tuple[str, int]:
        """What the episode is an episode of."""
        return self.task, self.seed


class Journal:
    """The episodes that have ended; opening it forgets a line that was cut off when the process was killed."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError when a line before the last one is damaged."""
        self._path = folder / JOURNAL
        folder.mkdir(parents=True, exist_ok=True)
        data = self._path.read_bytes() if self._path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self._path, len(whole))
        lines = whole.decode(errors="replace").splitlines()
        found = [self._read(line, number) for number, line in enumerate(lines, 1)]
        self.episodes = {episode.key: episode for episode in found}

    def append(self, episode: EpisodeResult) -> None:
        """Add ``episode``; it is on the disk when this returns."""
        with self._path.open("ab") as file:
            file.write(json.dumps(asdict(episode)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.episodes[episode.key] = episode

    def _read(self, line: str, number: int) -> EpisodeResult:
        try:
            return EpisodeResult(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"line {number} of {str(self._path)!r} is damaged ({line[:40]!r}), so its episode is unknown; delete "
                "that line, and the episode is played again."
            ) from error


def write_tables(folder: Path, episodes: Sequence[EpisodeResult]) -> None:
    """Write ``episodes.csv`` and ``latency.csv`` with ``episodes`` in this order; each appears whole."""
    rows = [(e.task, e.seed, int(e.success), e.cause, e.length, repr(e.returns), e.video) for e in episodes]
    _write_csv(folder / EPISODES, _COLUMNS, rows)
    times = [(e.task, e.seed, e.decisions, f"{e.mean_ms:.3f}", f"{e.max_ms:.3f}") for e in episodes]
    _write_csv(folder / LATENCY, _LATENCY_COLUMNS, times)


def read_episodes(folder: Path) -> list[EpisodeResult]:
    """The episodes of ``episodes.csv``, without latencies; raises UserError when there is none or it is damaged."""
    path = folder / EPISODES
    try:
        check_file(path)
        with path.open(encoding="utf-8", newline="") as file:
            return [_of_row(row) for row in csv.DictReader(file)]
    except FileNotFoundError as error:
        raise UserError(
            f"{str(folder)!r} has no {EPISODES}, so it holds no finished evaluation of a suite; run vla-rl eval "
            f"--suite NAME --policy POLICY --out {folder}."
        ) from error
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise UserError(
            f"{str(path)!r} is damaged ({error}), so its episodes cannot be read; delete it and run the evaluation "
            "again, which makes it from the journal."
        ) from error


def _of_row(row: dict[str, Any]) -> EpisodeResult:
    ended = bool(int(row["success"])), row["cause"], int(row["length"]), float(row["return"]), row["video"]
    return EpisodeResult(row["task"], int(row["seed"]), *ended, decisions=0, mean_ms=0.0, max_ms=0.0)


def _write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_whole(path, text.getvalue().encode(), 0o644)
