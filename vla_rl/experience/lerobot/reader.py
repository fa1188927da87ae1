"""Reading any LeRobotDataset folder, finished or not, one episode at a time; damage is named and the rest read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_memory, read_bytes
from vla_rl.experience.lerobot import layout, video
from vla_rl.experience.lerobot.disk import DamagedError, Problem, first_line
from vla_rl.experience.lerobot.features import INDEX, Feature, from_arrow, is_numeric
from vla_rl.experience.lerobot.lance import LanceTables
from vla_rl.experience.lerobot.metadata import UNREADABLE, EpisodeRow, read_metadata
from vla_rl.experience.lerobot.parquet import ParquetFile, WrongError, require_type

_ALWAYS = ("timestamp", "frame_index", "task_index")
_RATE_TOLERANCE = 0.1  # of the declared rate


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode of ``n`` frames.

    columns  {name: [n,*shape]}, [n] for shape (1,); pictures uint8 [n,h,w,c], text as numpy strings
    task     int64 [n], index into ``tasks``
    time     int64 [n], the dataset's ``frame_index``
    """

    index: int
    columns: dict[str, np.ndarray]
    task: np.ndarray
    tasks: tuple[str, ...]
    time: np.ndarray


class _Video(NamedTuple):
    """A video of an episode: its file in the dataset, the same to read from, and the episode's start in seconds."""

    file: str
    source: Path | BinaryIO
    start: float = 0.0


class DatasetReader:
    """A dataset, its episodes read one at a time.

    Raises UserError when there is no dataset of version 2 or 3 at ``root``.  Cameras are read from videos and from
    pictures in parquet; columns that hold neither numbers nor text are left out, and what is taken out of ``names`` is
    not read.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._meta = read_metadata(self.root)
        whole = len(self._meta.rows) == self._meta.total
        self._rows = {i if whole else row.index: row for i, row in enumerate(self._meta.rows)}
        self._live = layout.folders(self.root, self._meta.total)
        self._files = LanceTables(self.root) if self._meta.is_lance else _Files(self.root)
        header = self.root / layout.RECORDING / layout.HEADER
        announced = layout.Header.load(header.parent).tasks if header.exists() else ()
        self.schema = self._meta.schema
        self.stats, self.problems = self._meta.stats, self._meta.problems  # of meta/ alone
        self.tasks = layout.task_table(self._meta.tasks, announced)
        self.names = [
            name
            for name, item in self.schema.features.items()
            if item.is_camera or item.dtype == "string" or is_numeric(item.dtype)
        ]

    def __len__(self) -> int:
        """The number of episodes, damaged and recorded ones included."""
        return self._meta.total + len(self._live)

    def read(self, episode: int) -> RecordedEpisode:
        """An episode; raises DamagedError, naming the file, when it cannot be read."""
        if not 0 <= episode < len(self):
            raise UserError(
                f"{str(self.root)!r} has no episode {episode}, so it cannot be read; there are 0 to {len(self) - 1}."
            )
        if episode >= self._meta.total:
            return self._read_live(episode)
        row = self._rows.get(episode)
        if row is None:
            blamed = next(problem for problem in self.problems if episode in problem.episodes)
            raise DamagedError(self.root, blamed)
        name = self._meta.data_path(row)
        table = self._files.episode(name, row, [*self.names, *_ALWAYS], self.schema.stored())
        self._require_steady(name, episode, table["timestamp"].to_numpy(), table["frame_index"].to_numpy())
        found = self._columns(episode, table, name, lambda key: self._video(row, key))
        task, tasks = self._tasks(row, table)
        return RecordedEpisode(episode, found, task, tasks, table["frame_index"].to_numpy())

    def episodes(
        self,
        chosen: Iterable[int] | None = None,
        on_damage: Callable[[Problem], None] | None = None,
    ) -> Iterator[RecordedEpisode]:
        """The ``chosen`` episodes, or all, one after the other.

        Damage raises DamagedError, unless ``on_damage`` is given: then it is called with each problem, and damaged
        episodes are left out.
        """
        if self.damaged_tasks and on_damage is None:
            raise DamagedError(self.root, self.damaged_tasks)
        if self.damaged_tasks and on_damage is not None:
            on_damage(self.damaged_tasks)
        chosen = list(range(len(self)) if chosen is None else chosen)
        self._meta.require_memory(self._finished(chosen), self.schema.frame_bytes(self.names))
        for episode in chosen:
            try:
                yield self.read(episode)
            except DamagedError as error:
                if on_damage is None:
                    raise
                on_damage(error.problem)

    @property
    def is_lance(self) -> bool:
        """Whether ``files`` are folders: tables of all episodes."""
        return self._meta.is_lance

    def files(self, chosen: Iterable[int] | None = None) -> set[str]:
        """The files, relative to ``root``, that the ``chosen`` episodes, or all, are read from besides ``meta/``."""
        videos = [name for name in self.schema.videos if name in self.names]
        rows = self._finished(range(self._meta.total) if chosen is None else chosen)
        return {file for row in rows for file in self._files_of(row, videos)}

    def _files_of(self, row: EpisodeRow, videos: Iterable[str]) -> list[str]:
        return [self._meta.data_path(row), *(self._meta.video_path(row, name) for name in videos)]

    def _finished(self, chosen: Iterable[int]) -> list[EpisodeRow]:
        return [self._rows[episode] for episode in chosen if episode in self._rows]

    @property
    def damaged_tasks(self) -> Problem | None:
        """The damage of the table of tasks; episodes with one task can be read without it."""
        return next((problem for problem in self.problems if problem.file == self._meta.tasks_file), None)

    def _require_steady(self, file: str, episode: int, times: np.ndarray, index: np.ndarray) -> None:
        """Raise DamagedError for an episode whose frames are out of order, or of another rate than the dataset's.

        Clocks may be late here and there: a rate is wrong where the mean interval is, also without the tenth that is
        longest and the tenth that is shortest.
        """
        if (jumps := np.flatnonzero(np.diff(index) != 1)).size:
            at = int(jumps[0])
            what = f"counts {index[at]}, {index[at + 1]}, so frames are missing, double or out of order"
            raise DamagedError(self.root, Problem(file, what, (episode,), "frame_index"))
        between, cut = np.sort(np.diff(times)), (len(times) - 1) // 10
        if not len(between):
            return
        means = np.array([between.mean(), between[cut : len(between) - cut].mean()])
        if not np.abs(means * self.schema.fps - 1.0).min() <= _RATE_TOLERANCE:
            what = f"has a frame every {means[1]:.3g} s where {self.schema.fps:g} frames per second are declared"
            raise DamagedError(self.root, Problem(file, what, (episode,), "timestamp"))

    def _read_live(self, episode: int) -> RecordedEpisode:
        folder = self._live[episode - self._meta.total]
        found = layout.load_episode(folder, self.root, episode)
        table = found.table()
        try:
            check_memory(self.schema.frame_bytes(self.names) * len(table), sum(found.sizes.values()))
        except ValueError as error:
            raise DamagedError(self.root, Problem(folder.name, f"is damaged ({error})", (episode,))) from error

        def video_of(column: str) -> _Video:
            path = found.video(column)
            return _Video(path.relative_to(self.root).as_posix(), path)

        name = (folder / layout.FRAMES).relative_to(self.root).as_posix()
        columns = self._columns(episode, table, name, video_of)
        tasks = layout.task_table(self.tasks, found.tasks)
        numbers = np.array([tasks.index(text) for text in found.tasks])
        return RecordedEpisode(
            episode, columns, numbers[table["task_index"].to_numpy()], tasks, table["frame_index"].to_numpy()
        )

    def _video(self, row: EpisodeRow, column: str) -> _Video:
        name = self._meta.video_path(row, column)
        return _Video(name, self._files.video(name, row, column), row.videos[column][1])

    def _columns(
        self, episode: int, table: pa.Table, file: str, video_of: Callable[[str], _Video]
    ) -> dict[str, np.ndarray]:
        columns = {}
        for name in self.names:
            feature, place = self.schema.features[name], file
            try:
                if feature.dtype == "video":
                    place, source, start = video_of(name)
                    times = start + table["frame_index"].to_numpy() / self.schema.fps  # timestamps may be a clock's
                    columns[name] = video.decode(source, times, self.schema.fps, feature)
                elif feature.dtype == "image":
                    columns[name] = _pictures(table[name], feature, self.root)
                else:
                    columns[name] = from_arrow(feature, table[name])
            except (ValueError, FileNotFoundError) as error:
                raise DamagedError(self.root, Problem(place, str(error), (episode,), name)) from error
        return columns

    def _tasks(self, row: EpisodeRow, table: pa.Table) -> tuple[np.ndarray, tuple[str, ...]]:
        task = table["task_index"].to_numpy()
        if self.damaged_tasks is None:
            if len(task) and not 0 <= task.min() <= task.max() < len(self.tasks):
                what = f"counts to {task.max()} but {self._meta.tasks_file} has {len(self.tasks)} texts"
                raise DamagedError(self.root, Problem(self._meta.data_path(row), what, (row.index,), "task_index"))
            return task, self.tasks
        if len(row.tasks) != 1:
            raise DamagedError(self.root, Problem(self._meta.tasks_file, self.damaged_tasks.what, (row.index,)))
        return np.zeros(len(table), np.int64), row.tasks


class _Files:
    """Reads row groups of parquet files, of which the last stays open, and names videos."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._name = ""
        self._file: ParquetFile | None = None
        self._owner = np.zeros(0, np.int64)

    def episode(self, name: str, row: EpisodeRow, columns: list[str], declared: dict[str, Feature]) -> pa.Table:
        """The frames of an episode; raises DamagedError."""
        wanted = [item for item in columns if item in declared]
        try:
            file = self._open(name)
            for column in wanted:
                require_type(file.schema, column, declared[column])
            return self._rows(file, row, wanted)
        except FileNotFoundError as error:
            raise DamagedError(self._root, Problem(name, "is missing", (row.index,))) from error
        except WrongError as error:
            raise DamagedError(self._root, Problem(name, str(error), (row.index,), error.column)) from error
        except UNREADABLE as error:
            what = f"cannot be read ({first_line(error)})"
            raise DamagedError(self._root, Problem(name, what, (row.index,))) from error

    def video(self, name: str, row: EpisodeRow, column: str) -> Path:
        return self._root / name

    def _open(self, name: str) -> ParquetFile:
        if self._file is None or self._name != name:
            self._file = None
            file = ParquetFile(self._root / name)
            require_type(file.schema, "episode_index", Feature(INDEX["episode_index"]))
            self._owner = file.read(["episode_index"])["episode_index"].to_numpy()
            self._file, self._name = file, name
        return self._file

    def _rows(self, file: ParquetFile, row: EpisodeRow, columns: list[str]) -> pa.Table:
        mine = np.flatnonzero(self._owner == row.index)
        if len(mine) != row.length or not row.length or mine[-1] - mine[0] + 1 != row.length:
            raise WrongError(f"holds {len(mine)} frames of episode {row.index} where meta/ says {row.length}")
        ends = np.cumsum(file.group_rows)
        first, last = np.searchsorted(ends, [mine[0], mine[-1]], side="right")
        before = int(ends[first - 1]) if first else 0
        table = file.read(columns, range(int(first), int(last) + 1))
        return table.slice(int(mine[0]) - before, row.length)


def _pictures(column: pa.ChunkedArray, feature: Feature, root: Path) -> np.ndarray:
    frames: list[np.ndarray] = []
    for item in (value.as_py() for value in column):
        data = item and (item["bytes"] or (item["path"] and _file_bytes(root, item["path"])))
        if not data:
            raise ValueError(f"has no picture in frame {len(frames)}")
        frames.append(video.decode_picture(data, feature))
    if len({frame.shape for frame in frames}) > 1:
        raise ValueError("has pictures of several sizes")
    return np.stack(frames)


def _file_bytes(root: Path, name: str) -> bytes:
    """A picture that lies beside; raises ValueError for one that lies outside of the dataset."""
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise ValueError(f"names {name[:80]!r}, which is no path in the dataset")
    try:
        return read_bytes(root / name)
    except FileNotFoundError as error:
        raise ValueError(f"names the picture {name[:80]!r}, which is missing") from error
