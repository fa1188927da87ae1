"""``Demonstrations`` to a LeRobotDataset v3.0 folder and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from vla_rl.contract.errors import ContractError, UserError, did_you_mean
from vla_rl.contract.trust import check_memory, read_bytes
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot import live, video
from vla_rl.experience.lerobot.disk import DamagedError, Problem, drop_lock, merged, take_lock
from vla_rl.experience.lerobot.features import INDEX, Feature, Schema, fits, from_arrow, is_numeric
from vla_rl.experience.lerobot.live import RECORDING
from vla_rl.experience.lerobot.parquet import ParquetFile
from vla_rl.experience.lerobot.video import Codec, camera
from vla_rl.experience.lerobot.writer import DatasetWriter, repair

__all__ = ["Recording", "read", "repair", "schema_of"]

STATE, ACTION, SEED = "observation.state", "action", "complementary_info.seed"
_CAMERA = "observation.images."


def schema_of(episodes: Demonstrations, video: str = "auto", codec: Codec | None = None) -> Schema:
    """The columns that ``episodes`` need; ``video`` says which cameras become video, see ``video.camera``."""
    features = {
        _CAMERA + name: camera(frames.shape[1:], episodes.fps, video, codec) for name, frames in episodes.images.items()
    }
    features[STATE] = Feature("float32", episodes.state.shape[1:], list(episodes.state_names) or None)
    features[ACTION] = Feature("float32", episodes.action.shape[1:], list(episodes.action_names) or None)
    features |= {name: _column(values) for name, values in episodes.extras.items()}
    features[SEED] = Feature("int64")
    return Schema(episodes.fps, features, episodes.robot)


class Recording:
    """A dataset at ``root`` with the columns of the first episodes that are added; see ``DatasetWriter``.

    As a context manager it is the folder's one writer from its beginning: before the first episode is played.
    """

    def __init__(self, root: Path, video: str = "auto", codec: Codec | None = None) -> None:
        self.root = root
        self._video, self._codec = video, codec
        self._writer: DatasetWriter | None = None
        self._lock: int | None = None  # until there is a writer

    def add(self, episodes: Demonstrations) -> None:
        """Add all ``episodes``; each is synced to the disk before the next is written."""
        if self._writer is None:
            schema = schema_of(episodes, self._video, self._codec)
            self._writer = DatasetWriter(self.root, schema, episodes.tasks, lock=self._lock)
            self._lock = None
        _write(self._writer, episodes)

    def __enter__(self) -> Recording:
        self._lock = take_lock(self.root / RECORDING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)
        elif self._lock is not None:
            drop_lock(self.root / RECORDING, self._lock)


def _write(writer: DatasetWriter, episodes: Demonstrations) -> None:
    columns = {_CAMERA + name: frames for name, frames in episodes.images.items()}
    columns |= {STATE: episodes.state, ACTION: episodes.action, SEED: episodes.seed, **episodes.extras}
    texts = np.array(episodes.tasks, dtype=np.str_)[episodes.task]
    if len(set(episodes.tasks)) < len(episodes.tasks):
        raise ContractError("two tasks have the same text, so they would become one; give each its own text.")
    if any((episodes.time[begin:end] != np.arange(end - begin)).any() for begin, end in episodes.spans()):
        raise ContractError(
            "an episode's time does not count 0, 1, 2, ... as a dataset's frame index does; record it from its start."
        )
    for begin, end in episodes.spans():
        writer.add({name: values[begin:end] for name, values in columns.items()}, texts[begin:end].tolist())


def read(
    path: Path, chosen: Iterable[int] | None = None, on_damage: Callable[[Problem], None] | None = None
) -> Iterator[Demonstrations]:
    """The episodes of any dataset, one ``Demonstrations`` each, numbered as there; see ``DatasetReader.episodes``.

    ``observation.state`` and ``action`` are the state (without entries where there is none) and the action; every
    camera and every other column comes along.  Raises UserError when there is no ``action``.
    """
    reader = DatasetReader(path)
    if ACTION not in reader.names:
        raise UserError(
            f"{str(path)!r} has no column {ACTION!r}, so there is nothing to imitate; its columns are "
            f"{', '.join(reader.names)}."
        )
    for episode in reader.episodes(chosen, on_damage=on_damage):
        problem = _not_finite(episode)
        if problem is None:
            yield _demonstrations(reader, episode)
        elif on_damage is None:
            raise DamagedError(reader.root, problem)
        else:
            on_damage(problem)


def _not_finite(episode: RecordedEpisode) -> Problem | None:
    """The first number of state or action that is NaN or infinite."""
    for name in (STATE, ACTION):
        values = episode.columns.get(name, np.zeros(0))
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            frame = int((~np.isfinite(values)).reshape(len(values), -1).any(axis=1).argmax())
            return Problem("data", f"is not finite in frame {frame}", (episode.index,), name)
    return None


def _demonstrations(reader: DatasetReader, episode: RecordedEpisode) -> Demonstrations:
    columns, features, count = dict(episode.columns), reader.schema.features, len(episode.time)
    images = {_camera_name(name, features): columns.pop(name) for name in reader.schema.cameras}
    state = columns.pop(STATE, np.zeros((count, 0))).astype(np.float32).reshape(count, -1)
    action = columns.pop(ACTION).astype(np.float32).reshape(count, -1)
    seed = columns.pop(SEED, np.full(count, -1)).astype(np.int64)
    return Demonstrations(
        images=images,
        state=state,
        task=episode.task.astype(np.int64),
        time=episode.time.astype(np.int64),
        action=action,
        episode=np.full(count, episode.index, np.int64),
        seed=seed,
        tasks=episode.tasks,
        fps=reader.fps,
        state_names=features[STATE].labels() if STATE in features else (),
        action_names=features[ACTION].labels(),
        extras=columns,
        robot=reader.schema.robot,
    )


def _camera_name(name: str, features: Iterable[str]) -> str:
    """``observation.images.front`` -> ``front``, ``observation.image`` -> ``image``, others as they are."""
    short = name.removeprefix(_CAMERA) if name.startswith(_CAMERA) else name.removeprefix("observation.")
    return name if short != name and _CAMERA + short in features and _CAMERA + short != name else short


def _column(values: np.ndarray) -> Feature:
    if values.dtype.kind == "U":
        return Feature("string")
    if values.dtype.kind not in "fiub":
        raise ContractError(
            f"a column of type {values.dtype} cannot be kept in a dataset; give numbers, truth values or text."
        )
    return Feature(str(values.dtype), values.shape[1:] or (1,))


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


class DatasetReader:
    """A dataset, its episodes read one at a time.

    Raises UserError when there is no dataset of version 3 at ``root``.  Cameras are read as uint8, from videos and from
    pictures in parquet; depth videos and columns that hold neither numbers nor text are left out.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._meta = live.read(self.root)
        whole = len(self._meta.rows) == self._meta.total
        self._rows = {i if whole else row.index: row for i, row in enumerate(self._meta.rows)}
        self._live = live.folders(self.root, self._meta.total)
        self._files = _ParquetFiles(self.root)
        header = self.root / live.RECORDING / live.HEADER
        announced = live.Header.load(header.parent).tasks if header.exists() else ()
        self.schema = self._meta.schema
        self.stats = self._meta.stats
        self.tasks = live.task_table(self._meta.tasks, announced)
        self.names = [name for name, item in self.schema.features.items() if item.is_camera or _is_readable(item)]

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.schema.fps

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is damaged in ``meta/``; :meth:`check` reads everything else too."""
        return self._meta.problems

    @property
    def splits(self) -> dict[str, range]:
        """{name: episodes} as ``info.json`` has them."""
        spans = {name: span.split(":") for name, span in self._meta.info.get("splits", {}).items()}
        return {name: range(int(span[0]), int(span[-1])) for name, span in spans.items()}

    def __len__(self) -> int:
        """The number of episodes, damaged and recorded ones included."""
        return self._meta.total + len(self._live)

    def read(self, episode: int, columns: Iterable[str] | None = None) -> RecordedEpisode:
        """All, or the named, columns of an episode; raises DamagedError, naming the file, when it cannot be read."""
        wanted = self.names if columns is None else [self._known(name) for name in columns]
        if not 0 <= episode < len(self):
            raise UserError(
                f"{str(self.root)!r} has no episode {episode}, so it cannot be read; there are 0 to {len(self) - 1}."
            )
        if episode >= self._meta.total:
            return self._read_live(episode, wanted)
        row = self._rows.get(episode)
        if row is None:
            blamed = next(problem for problem in self._meta.problems if episode in problem.episodes)
            raise DamagedError(self.root, blamed)
        name = self._meta.data_path(row)
        table = self._files.episode(name, row, [*wanted, *_ALWAYS], self.schema.stored())
        self._require_steady(name, episode, table["timestamp"].to_numpy(), table["frame_index"].to_numpy())
        files = {key: (self._meta.video_path(row, key), row.videos[key][1]) for key in self.schema.videos}
        found = self._columns(episode, wanted, table, name, files)
        task, tasks = self._tasks(row, table)
        return RecordedEpisode(episode, found, task, tasks, table["frame_index"].to_numpy())

    def episodes(
        self,
        chosen: Iterable[int] | None = None,
        columns: Iterable[str] | None = None,
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
        for episode in range(len(self)) if chosen is None else chosen:
            try:
                yield self.read(episode, columns)
            except DamagedError as error:
                if on_damage is None:
                    raise
                on_damage(error.problem)

    def check(self) -> list[Problem]:
        """Read everything and return what is damaged: one entry per file and column, with the affected episodes."""
        found = [problem for problem in self._meta.problems if not problem.episodes]
        for episode in range(len(self)):
            try:
                self.read(episode)
            except DamagedError as error:
                found.append(error.problem)
        return merged(found)

    @property
    def damaged_tasks(self) -> Problem | None:
        """The damage of the table of tasks; episodes with one task can be read without it."""
        return next((problem for problem in self._meta.problems if problem.file == live.TASKS), None)

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
        if not np.abs(means * self.fps - 1.0).min() <= _RATE_TOLERANCE:
            what = f"has a frame every {means[1]:.3g} s where {self.fps:g} frames per second are declared"
            raise DamagedError(self.root, Problem(file, what, (episode,), "timestamp"))

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise UserError(
                f"{str(self.root)!r} has no column {name!r} that can be read, so nothing was; "
                f"{did_you_mean(name, self.names)}"
            )
        return name

    def _read_live(self, episode: int, wanted: list[str]) -> RecordedEpisode:
        folder = self._live[episode - self._meta.total]
        found = live.load(folder, self.root, episode)
        table = found.table()
        try:
            check_memory(self.schema.frame_bytes * len(table), sum(found.sizes.values()))
        except ValueError as error:
            raise DamagedError(self.root, Problem(folder.name, f"is damaged ({error})", (episode,))) from error
        files = {key: (found.video(key).relative_to(self.root).as_posix(), 0.0) for key in self.schema.videos}
        name = (folder / live.FRAMES).relative_to(self.root).as_posix()
        columns = self._columns(episode, wanted, table, name, files)
        tasks = live.task_table(self.tasks, found.tasks)
        numbers = np.array([tasks.index(text) for text in found.tasks])
        return RecordedEpisode(
            episode, columns, numbers[table["task_index"].to_numpy()], tasks, table["frame_index"].to_numpy()
        )

    def _columns(
        self, episode: int, wanted: list[str], table: pa.Table, file: str, videos: dict[str, tuple[str, float]]
    ) -> dict[str, np.ndarray]:
        columns = {}
        for name in wanted:
            feature = self.schema.features[name]
            place, start = videos.get(name, (file, 0.0))
            try:
                if feature.dtype == "video":
                    times = start + table["frame_index"].to_numpy() / self.fps  # timestamps may be a clock's
                    columns[name] = video.decode(self.root / place, times, self.fps, feature.shape)
                elif feature.dtype == "image":
                    columns[name] = _pictures(table[name], feature, self.root)
                else:
                    columns[name] = from_arrow(feature, table[name])
            except (ValueError, FileNotFoundError) as error:
                raise DamagedError(self.root, Problem(place, str(error), (episode,), name)) from error
        return columns

    def _tasks(self, row: live.EpisodeRow, table: pa.Table) -> tuple[np.ndarray, tuple[str, ...]]:
        task = table["task_index"].to_numpy()
        if self.damaged_tasks is None:
            if len(task) and not 0 <= task.min() <= task.max() < len(self.tasks):
                what = f"counts to {task.max()} but {live.TASKS} has {len(self.tasks)} texts"
                raise DamagedError(self.root, Problem(self._meta.data_path(row), what, (row.index,), "task_index"))
            return task, self.tasks
        if len(row.tasks) != 1:
            raise DamagedError(self.root, Problem(live.TASKS, self.damaged_tasks.what, (row.index,)))
        return np.zeros(len(table), np.int64), row.tasks


class _ParquetFiles:
    """Reads row groups of parquet files and keeps the last file open."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._name = ""
        self._file: ParquetFile | None = None
        self._owner = np.zeros(0, np.int64)

    def episode(self, name: str, row: live.EpisodeRow, columns: list[str], declared: dict[str, Feature]) -> pa.Table:
        """The frames of an episode; raises DamagedError."""
        wanted = [item for item in columns if item in declared]
        try:
            file = self._open(name)
            for column in wanted:
                _require_type(file.schema, column, declared[column])
            return self._rows(file, row, wanted)
        except FileNotFoundError as error:
            raise DamagedError(self._root, Problem(name, "is missing", (row.index,))) from error
        except _WrongError as error:
            raise DamagedError(self._root, Problem(name, str(error), (row.index,), error.column)) from error
        except live.UNREADABLE as error:
            what = f"cannot be read ({_short(error)})"
            raise DamagedError(self._root, Problem(name, what, (row.index,))) from error

    def _open(self, name: str) -> ParquetFile:
        if self._file is None or self._name != name:
            self._file = None
            file = ParquetFile(self._root / name)
            _require_type(file.schema, "episode_index", Feature(INDEX["episode_index"]))
            self._owner = file.read(["episode_index"])["episode_index"].to_numpy()
            self._file, self._name = file, name
        return self._file

    def _rows(self, file: ParquetFile, row: live.EpisodeRow, columns: list[str]) -> pa.Table:
        mine = np.flatnonzero(self._owner == row.index)
        if len(mine) != row.length or not row.length or mine[-1] - mine[0] + 1 != row.length:
            raise _WrongError(f"holds {len(mine)} frames of episode {row.index} where meta/episodes has {row.length}")
        ends = np.cumsum(file.group_rows)
        first, last = np.searchsorted(ends, [mine[0], mine[-1]], side="right")
        before = int(ends[first - 1]) if first else 0
        table = file.read(columns, range(int(first), int(last) + 1))
        return table.slice(int(mine[0]) - before, row.length)


class _WrongError(Exception):
    """A readable parquet file with wrong content; the text begins with a verb."""

    def __init__(self, what: str, column: str = "") -> None:
        super().__init__(what)
        self.column = column


def _require_type(found: pa.Schema, column: str, feature: Feature) -> None:
    if column not in found.names:
        raise _WrongError("is missing", column)
    kind = found.field(column).type
    if not fits(feature, kind):
        raise _WrongError(f"is {kind} where {feature.dtype} {list(feature.shape)} is declared", column)


def _pictures(column: pa.ChunkedArray, feature: Feature, root: Path) -> np.ndarray:
    channels = 1 if 1 in (feature.shape[0], feature.shape[-1]) else 3
    frames: list[np.ndarray] = []
    for item in (value.as_py() for value in column):
        data = item and (item["bytes"] or (item["path"] and _file_bytes(root, item["path"])))
        if not data:
            raise ValueError(f"has no picture in frame {len(frames)}")
        frames.append(video.decode_picture(data, channels, feature.shape))
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


def _is_readable(feature: Feature) -> bool:
    return feature.dtype == "string" or is_numeric(feature.dtype)


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
