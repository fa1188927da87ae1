"""Writing a dataset one episode at a time: a killed process loses at most the episode that it was writing.

Recorded episodes are turned into v3.0 files below ``recording/compacting``, synced and read back.  Then
``committing.json`` lists the files, they are moved to free names, ``tasks.parquet`` grows, and ``info.json``, which
counts the episodes, is replaced: before that the dataset is the old one plus recorded episodes, after it the new one.
The remaining steps (``stats.json``, deleting the recorded folders) follow from ``committing.json``.  :func:`recover`
undoes or completes the commit of a killed process.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.trust import read_json, sync
from vla_rl.experience.lerobot import layout, metadata, video
from vla_rl.experience.lerobot.disk import (
    LOCK,
    DamagedError,
    Problem,
    first_line,
    make_folder,
    move,
    remove_locked,
    take_lock,
    write_json,
)
from vla_rl.experience.lerobot.features import (
    VERSION,
    Feature,
    Schema,
    Stats,
    combined,
    episode_statistics,
    is_numeric,
    stats_to_json,
)
from vla_rl.experience.lerobot.layout import Header, Limits, LiveEpisode
from vla_rl.experience.lerobot.metadata import Metadata, Place

_COMPACTING = "compacting"
_MB = 1 << 20
_WRITE_ERRORS = (*video.FAILURES, pa.ArrowException)


class DatasetWriter:
    """A LeRobotDataset v3.0 in ``root``, new or grown by episodes with the same columns.

    :meth:`add` returns when an episode is synced to the disk, in a folder of its own that our reader can read.
    :meth:`finalise` turns these folders into v3.0 files, which lerobot can read.  As a context manager it finalises
    unless an exception is raised; :func:`repair` does so later for a process that was killed.

    ``tasks`` are texts whose numbers are fixed in advance.  An existing dataset keeps its limits and video settings.
    ``lock``: of ``disk.take_lock``, where the caller has it; it belongs to the writer from here on.
    Raises UserError when ``root`` is something else, ContractError when its columns differ.
    """

    def __init__(
        self,
        root: Path,
        schema: Schema,
        tasks: Sequence[str] = (),
        limits: Limits | None = None,
        lock: int | None = None,
    ) -> None:
        self.root = root
        self._header = _header(root, schema, tasks, limits or Limits())
        self.schema = self._header.schema  # the columns that :meth:`add` expects
        self._lock, self._begun = lock, False
        self._count = 0

    def add(self, columns: Mapping[str, np.ndarray], tasks: str | Sequence[str]) -> int:
        """Keep one episode and return its number.

        ``columns`` {name: [n,*shape], or [n] for shape (1,)} with the schema's names and dtypes, cameras as uint8
        [n,h,w,c]; ``tasks`` is one text, or one per frame.  Raises ContractError or NonFiniteError for wrong
        columns and UserError when writing fails; the episode is then not added, and the others stay.
        """
        length = _check(self.schema, columns)
        texts = [tasks] * length if isinstance(tasks, str) else list(tasks)
        if len(texts) != length:
            raise ContractError(
                f"an episode of {length} frames comes with {len(texts)} task texts, so they cannot be matched; give "
                "one text, or one per frame."
            )
        table = layout.task_table(texts)
        numbers = np.array([table.index(text) for text in texts])
        shaped = {
            name: np.asarray(columns[name]).reshape(length, *([] if item.shape == (1,) else item.shape))
            for name, item in self.schema.features.items()
        }
        try:
            self._begin()
            folder = layout.next_folder(self.root, self._count)
            layout.write_episode(folder, self.schema, shaped, table, numbers)
        except _WRITE_ERRORS as error:
            self._abandon()
            raise UserError(
                f"the episode could not be written to {str(self.root)!r} ({_reason(error)}), so it is not in the "
                "dataset, but those before it are; free some disk space or choose another folder."
            ) from error
        return self._count + len(layout.folders(self.root, self._count)) - 1

    def finalise(self) -> None:
        """Turn all added episodes into v3.0 files; raises DamagedError when an episode has changed on the disk.

        Such an episode is moved aside and all others are finished.  They join the split of the last old one.
        """
        problems = list[Problem]()
        if self._lock is not None or (self.root / layout.RECORDING).exists():
            self._hold()
            problems = _finish(self.root)
        self.close()
        if problems:
            raise DamagedError(self.root, problems[0])

    def close(self) -> None:
        """Release the lock for other writers; added episodes stay as they are."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock, self._begun = None, False

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self.finalise()
        finally:
            self.close()

    def _begin(self) -> None:
        """Before the first episode: take the lock, recover from a killed process, write the header."""
        self._hold()
        if self._begun:
            return
        self._begun = True
        recover(self.root)
        self._count = metadata.read_metadata(self.root).total if (self.root / metadata.INFO).exists() else 0
        self._header.save(self.root / layout.RECORDING)

    def _hold(self) -> None:
        """Take the lock, or see that the folder is still the one that it is of."""
        if self._lock is None:
            self._lock = take_lock(self.root / layout.RECORDING)
        _require_own(self.root / layout.RECORDING, self._lock)

    def _abandon(self) -> None:
        """Remove everything but finished episodes."""
        recording = self.root / layout.RECORDING
        for leftover in recording.glob("episode-*.writing"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not any(recording.glob("episode-*")) and not (recording / layout.DAMAGED).exists():
            with suppress(OSError):
                remove_locked(recording)
            self.close()
            if self.root.is_dir() and not any(self.root.iterdir()):
                self.root.rmdir()


def repair(root: Path) -> list[Problem]:
    """Finish the recording of a process that was killed; returns the damaged episodes.

    All episodes that were added become v3.0 files.  Those whose files no longer match their SHA-256 are moved to
    ``recording/damaged``.  Raises UserError when there is nothing to repair, or while another process writes.
    """
    if not (root / layout.RECORDING).is_dir():
        raise UserError(
            f"{str(root)!r} holds no unfinished recording, so there is nothing to repair; read it as it is."
        )
    handle = take_lock(root / layout.RECORDING)
    try:
        return _finish(root)
    finally:
        os.close(handle)


def _finish(root: Path) -> list[Problem]:
    recording = root / layout.RECORDING
    try:
        recover(root)
        if layout.is_blank(recording):
            remove_locked(recording)
            return []
        known, header = metadata.read_metadata(root), Header.load(recording)
        _require_whole(known)
        episodes, problems = [], []
        for i, folder in enumerate(layout.folders(root, known.total)):
            try:
                episodes.append(layout.load_episode(folder, root, known.total + i))
            except DamagedError as error:
                problems.append(error.problem)
                move(folder, recording / layout.DAMAGED / folder.name)
        if episodes:
            _compact(root, header, known, episodes)
    except _WRITE_ERRORS as error:
        raise UserError(
            f"the episodes in {str(recording)!r} could not be made into v3.0 files ({_reason(error)}), so they stay "
            "where they are; free some disk space and repair the dataset."
        ) from error
    if not (recording / layout.DAMAGED).exists():
        remove_locked(recording)
    return problems


def _header(root: Path, schema: Schema, tasks: Sequence[str], limits: Limits) -> Header:
    for name, feature in schema.features.items():
        if feature.dtype not in ("image", "video", "string") and not is_numeric(feature.dtype):
            raise ContractError(
                f"column {name!r} has the type {feature.dtype!r}, which vla-rl does not write; use a numpy type, "
                "'string', 'image' or 'video'."
            )
    recording = root / layout.RECORDING
    if not root.exists() or (root.is_dir() and set(root.iterdir()) <= {recording} and layout.is_blank(recording)):
        return Header(schema, tuple(tasks), limits)
    if not (root / metadata.INFO).exists() and not (recording / layout.HEADER).exists():
        raise UserError(
            f"{str(root)!r} exists and is no dataset, so nothing is written into it; choose another folder."
        )
    known = metadata.read_metadata(root)
    _require_whole(known)
    if different := _difference(known.schema, schema):
        raise ContractError(f"{str(root)!r} {different}, so the episodes cannot be added to it; choose another folder.")
    if (recording / layout.HEADER).exists():
        header = Header.load(recording)
        return Header(header.schema, layout.task_table(header.tasks, tasks), header.limits)
    info = known.info
    kept = Limits(info["data_files_size_in_mb"], info["video_files_size_in_mb"], info["chunks_size"])
    return Header(known.schema, layout.task_table(known.tasks, tasks), kept)


def _difference(known: Schema, other: Schema) -> str:
    """What keeps episodes of ``other`` out of a dataset of ``known``; "" where nothing does."""
    if abs(known.fps - other.fps) >= 1e-6:
        return f"has {known.fps:g} frames per second and not {other.fps:g}"
    for name in {**known.features, **other.features}:
        mine, theirs = known.features.get(name), other.features.get(name)
        if mine is None or theirs is None:
            return f"{'lacks' if mine is None else 'has'} the column {name!r}, unlike them"
        if (mine.dtype, mine.shape, mine.labels()) != (theirs.dtype, theirs.shape, theirs.labels()):
            return f"has another type, shape or names in its column {name!r}"
    return ""


def _require_whole(known: Metadata) -> None:
    if known.is_old or known.is_lance:
        tables = " in Lance tables" if known.is_lance else ""
        raise UserError(
            f"{str(known.root)!r} is a LeRobotDataset {known.version}{tables}, which is read but not written, so no "
            "episode was added; record into a new folder."
        )
    if known.problems:
        raise DamagedError(known.root, known.problems[0])
    if known.rows and known.rows[-1].index >= known.total:
        raise UserError(
            f"the episodes of {str(known.root)!r} have numbers up to {known.rows[-1].index} but are {known.total}, so "
            "a new one would get a number that is taken; record into a new folder, and learn from both."
        )


def _check(schema: Schema, columns: Mapping[str, np.ndarray]) -> int:
    """The number of frames; raises ContractError or NonFiniteError when ``columns`` do not fit."""
    if set(columns) != set(schema.features):
        raise ContractError(
            f"an episode has the columns {sorted(columns)} but the dataset has {sorted(schema.features)}, so it cannot "
            "be added; give exactly those."
        )
    lengths = {name: len(values) for name, values in columns.items()}
    length = next(iter(lengths.values()))
    if length < 1 or set(lengths.values()) != {length}:
        raise ContractError(
            f"the columns of an episode have {lengths} frames, so it cannot be added; give all the same."
        )
    for name, feature in schema.features.items():
        values = np.asarray(columns[name])
        wanted = "uint8" if feature.is_camera else feature.dtype
        right = values.dtype.kind == "U" if wanted == "string" else str(values.dtype) == wanted
        shapes = {(length, *feature.shape)} | ({(length,)} if feature.shape == (1,) else set())
        if not right or values.shape not in shapes:
            raise ContractError(
                f"column {name!r} of an episode is {values.dtype}{list(values.shape)} but {wanted}"
                f"{[length, *feature.shape]} is declared, so it cannot be added; mend one of them."
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            frame = int(np.argwhere(~np.isfinite(values))[0][0])
            raise NonFiniteError(
                f"column {name!r} of an episode is not finite in frame {frame}, so it was not added; leave such "
                "episodes out or replace the number."
            )
    return length


def _require_own(recording: Path, lock: int) -> None:
    """Raise UserError when the folder that this process has locked is no longer at its place."""
    own = recording / LOCK
    if not own.exists() or not os.path.samestat(own.stat(), os.fstat(lock)):
        raise UserError(
            f"{str(recording.parent)!r} was moved or removed while this process recorded into it, so the episode is "
            "not in the dataset, but those before it are where the folder went; start again in a new folder."
        )


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or first_line(error)


# -- v3.0 files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Numbered:
    """A recorded episode with its place in the dataset."""

    live: LiveEpisode
    index: int  # of the episode
    first: int  # of its first frame


_Groups: TypeAlias = dict[Place, list[_Numbered]]


def _compact(root: Path, header: Header, known: Metadata, episodes: Sequence[LiveEpisode]) -> None:
    """Add verified ``episodes`` to the dataset ``known``; the caller holds the lock and has called :func:`recover`."""
    schema, limits = header.schema, header.limits
    folder = root / layout.RECORDING / _COMPACTING
    first = int(known.info.get("total_frames", 0)) + np.cumsum([0, *(episode.length for episode in episodes)])
    new = [_Numbered(item, known.total + i, int(first[i])) for i, item in enumerate(episodes)]
    tasks = layout.task_table(known.tasks, header.tasks, *(episode.tasks for episode in episodes))
    numbers = {text: i for i, text in enumerate(tasks)}
    files = {"": _grouped(new, layout.FRAMES, _next_place(known, ""), limits.data_mb, limits.files_per_folder)}
    _write_data(folder, schema, numbers, files[""])
    for name in schema.videos:
        begin = _next_place(known, name)
        files[name] = _grouped(new, f"{name}.mp4", begin, limits.video_mb, limits.files_per_folder)
        _write_videos(folder, schema, name, files[name])
    stats = [_all_statistics(item, numbers) for item in new]
    _write_rows(folder, root, _rows_of(schema, new, files, stats), limits)
    _write_tasks(folder, tasks)
    info = _info(known, header, len(tasks), known.total + len(new), int(first[-1]))
    whole = combined([*([known.stats] if known.total else []), *stats])
    _commit(root, info, whole, [episode.folder.name for episode in episodes])


def recover(root: Path) -> None:
    """Repair a dataset whose writer was killed; no finished episode is lost."""
    recording = root / layout.RECORDING
    commit = layout.read_committing(recording)
    if commit and layout.is_committed(recording, _committed(root)):
        _complete(root, commit)
    elif commit:
        lost = [name for name in commit["folders"] if not (recording / name).is_dir()]
        if lost:
            raise UserError(
                f"{str(root / metadata.INFO)!r} does not count the episodes of {str(recording / lost[0])!r}, which is "
                "gone, so it is not the one that was last written and nothing was touched; copy it again."
            )
        for name in commit["files"]:
            (root / name).unlink(missing_ok=True)
    (recording / layout.COMMITTING).unlink(missing_ok=True)
    shutil.rmtree(recording / _COMPACTING, ignore_errors=True)
    for leftover in recording.glob("episode-*.writing"):
        shutil.rmtree(leftover, ignore_errors=True)


def _commit(root: Path, info: dict[str, Any], stats: Stats, folders: list[str]) -> None:
    recording = root / layout.RECORDING
    ready = recording / _COMPACTING
    files = sorted(path.relative_to(ready).as_posix() for path in ready.rglob("*") if path.is_file())
    fresh = [name for name in files if name != metadata.TASKS]
    taken = [name for name in fresh if (root / name).exists()]
    if taken:
        raise UserError(
            f"{str(root / taken[0])!r} exists although {metadata.INFO} does not mention it, so the recorded episodes "
            "stay where they are; move that file away and repair the dataset again."
        )
    counted = {"total_episodes": info["total_episodes"], "stats": stats_to_json(stats)}
    commit = {**counted, "files": fresh, "folders": folders}
    write_json(recording / layout.COMMITTING, commit)
    for name in [*fresh, metadata.TASKS]:
        move(ready / name, root / name)
    write_json(root / metadata.INFO, info)
    _complete(root, commit)
    (recording / layout.COMMITTING).unlink()
    shutil.rmtree(ready)


def _complete(root: Path, commit: Mapping[str, Any]) -> None:
    """The remaining steps once ``info.json`` counts the episodes; repeating them changes nothing."""
    if _committed(root) == commit["total_episodes"]:  # lerobot may have added episodes, with newer statistics
        write_json(root / metadata.STATS, commit["stats"])
    for name in commit["folders"]:
        folder = root / layout.RECORDING / name
        if folder.exists():  # one that cannot be removed must not count as another episode
            shutil.rmtree(folder)


def _committed(root: Path) -> int:
    path = root / metadata.INFO
    return int(read_json(path)["total_episodes"]) if path.exists() else 0


def _next_place(known: Metadata, column: str) -> Place:
    """The first unused file: adding episodes never changes an existing file."""
    used = [row.videos[column][0] if column else row.data for row in known.rows]
    if not used:
        return Place()
    last = max(used, key=lambda place: (place.chunk, place.file))
    return last.next(int(known.info.get("chunks_size", 1000)))


def _grouped(
    episodes: Sequence[_Numbered], file: str, begin: Place, megabytes: float, files_per_folder: int
) -> _Groups:
    """Which episodes share a file: it is closed when the next would bring it to ``megabytes``."""
    groups: _Groups = {begin: []}
    place, size = begin, 0.0
    for episode in episodes:
        more = episode.live.sizes[file] / _MB
        if groups[place] and size + more >= megabytes:
            place, size = place.next(files_per_folder), 0.0
            groups[place] = []
        groups[place].append(episode)
        size += more
    return groups


def _write_data(folder: Path, schema: Schema, numbers: Mapping[str, int], groups: _Groups) -> None:
    for place, episodes in groups.items():
        path = folder / place.path(metadata.DATA)
        make_folder(path.parent)
        with pq.ParquetWriter(path.absolute(), schema.arrow(), compression="snappy", write_page_checksum=True) as file:
            for episode in episodes:
                file.write_table(_frames(schema, episode, numbers), row_group_size=max(episode.live.length, 1))
        sync(path)
        reread = pq.ParquetFile(path.absolute(), page_checksum_verification=True)
        for i, episode in enumerate(episodes):
            if not reread.read_row_group(i).equals(_frames(schema, episode, numbers)):
                raise OSError(f"{path.name} does not read as it was written")


def _frames(schema: Schema, episode: _Numbered, numbers: Mapping[str, int]) -> pa.Table:
    """A recorded table with the indices that it has in the dataset."""
    table = episode.live.table()
    index = _indices(episode, table["task_index"].to_numpy(), numbers)
    arrays = [pa.array(index[name]) if name in index else table[name] for name in schema.arrow().names]
    return pa.table(arrays, schema=schema.arrow())


def _indices(episode: _Numbered, task_index: np.ndarray, numbers: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The index columns that depend on the dataset."""
    length = episode.live.length
    return {
        "episode_index": np.full(length, episode.index),
        "index": np.arange(episode.first, episode.first + length),
        "task_index": np.array([numbers[text] for text in episode.live.tasks])[task_index],
    }


def _write_videos(folder: Path, schema: Schema, column: str, groups: _Groups) -> None:
    for place, episodes in groups.items():
        path = folder / place.path(metadata.VIDEO, column)
        make_folder(path.parent)
        video.join([(item.live.video(column), item.live.length) for item in episodes], path, schema.fps)
        sync(path)
        times = video.packet_times(path)
        wanted = np.arange(sum(item.live.length for item in episodes)) / schema.fps
        if len(times) != len(wanted) or np.abs(times - wanted).max() > 1e-5:
            raise OSError(f"the joined video of {column!r} has {len(times)} frames where {len(wanted)} were recorded")


def _all_statistics(item: _Numbered, numbers: Mapping[str, int]) -> Stats:
    """The statistics of an episode, those of its index columns included, as lerobot keeps them."""
    indices = _indices(item, item.live.table()["task_index"].to_numpy(), numbers)
    return item.live.stats | episode_statistics(indices, {name: Feature("int64") for name in indices})


def _info(known: Metadata, header: Header, tasks: int, episodes: int, frames: int) -> dict[str, Any]:
    info: dict[str, Any] = {
        "codebase_version": VERSION,
        "chunks_size": header.limits.files_per_folder,
        "data_files_size_in_mb": header.limits.data_mb,
        "video_files_size_in_mb": header.limits.video_mb,
        "splits": {},
        "data_path": metadata.DATA,
        "video_path": metadata.VIDEO if header.schema.videos else None,
        **header.schema.to_json(),
        **known.info,
    }
    grown = {"total_episodes": episodes, "total_frames": frames, "total_tasks": tasks}
    return info | grown | {"splits": _splits(info["splits"], known.total, episodes)}


def _splits(splits: dict[str, str], before: int, after: int) -> dict[str, str]:
    """New episodes extend the split of the last old one; without any, the split is "train"."""
    last = next((name for name, span in splits.items() if span.endswith(f":{before}")), "train")
    return splits | {last: f"{splits.get(last, '0:').partition(':')[0]}:{after}"}


def _rows_of(
    schema: Schema, episodes: Sequence[_Numbered], files: Mapping[str, _Groups], stats: Sequence[Stats]
) -> list[dict[str, Any]]:
    """The rows of ``meta/episodes``, without the place of the rows themselves."""
    places: dict[tuple[str, int], tuple[Place, float]] = {}  # of a column's episode: its file, its start in seconds
    for name, groups in files.items():
        for place, items in groups.items():
            frames = np.cumsum([0, *(item.live.length for item in items)]).tolist()
            places |= {(name, item.index): (place, at / schema.fps) for item, at in zip(items, frames, strict=False)}
    rows = []
    for item, known in zip(episodes, stats, strict=True):
        place, _ = places["", item.index]
        row: dict[str, Any] = {
            "episode_index": item.index,
            "tasks": list(item.live.tasks),
            "length": item.live.length,
            "data/chunk_index": place.chunk,
            "data/file_index": place.file,
            "dataset_from_index": item.first,
            "dataset_to_index": item.first + item.live.length,
        }
        for name in schema.videos:
            place, start = places[name, item.index]
            row[f"videos/{name}/chunk_index"], row[f"videos/{name}/file_index"] = place.chunk, place.file
            row[f"videos/{name}/from_timestamp"] = start
            row[f"videos/{name}/to_timestamp"] = start + item.live.length / schema.fps
        row |= {f"stats/{name}/{key}": value.tolist() for name, part in known.items() for key, value in part.items()}
        rows.append(row)
    return rows


def _write_rows(folder: Path, root: Path, rows: list[dict[str, Any]], limits: Limits) -> None:
    """Write ``rows`` of new episodes below ``folder``, in files numbered after those of the dataset ``root``."""
    existing = sorted((root / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
    place = Place()
    if existing:
        chunk, file = (int(part.partition("-")[2]) for part in (existing[-1].parent.name, existing[-1].stem))
        place = Place(chunk, file).next(limits.files_per_folder)
    size = pa.Table.from_pylist(rows).nbytes / _MB
    per_file = max(1, math.floor(len(rows) * limits.data_mb / size)) if size > limits.data_mb else len(rows)
    for begin in range(0, len(rows), per_file):
        part = rows[begin : begin + per_file]
        own = {"meta/episodes/chunk_index": place.chunk, "meta/episodes/file_index": place.file}
        table = pa.Table.from_pylist([row | own for row in part])
        if existing:
            table = _conformed(table, pq.read_schema(existing[-1].absolute()))
        path = folder / place.path(metadata.EPISODES)
        _write_table(path, table)
        place = place.next(limits.files_per_folder)


def _conformed(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """With the columns of the existing files: all files of a dataset must agree."""
    wanted = wanted.remove_metadata()
    arrays = [
        table[item.name].cast(item.type) if item.name in table.column_names else pa.nulls(len(table), item.type)
        for item in wanted
    ]
    return pa.table(arrays, schema=wanted)


def _write_tasks(folder: Path, tasks: Sequence[str]) -> None:
    """Write ``tasks.parquet`` as pandas writes a frame whose index is the text."""
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, (kind, numpy) in kinds.items()
    ]
    description = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    schema = pa.schema(
        [("task_index", pa.int64()), ("task", pa.string())], metadata={"pandas": json.dumps(description)}
    )
    _write_table(folder / metadata.TASKS, pa.table([list(range(len(tasks))), list(tasks)], schema=schema))


def _write_table(path: Path, table: pa.Table) -> None:
    make_folder(path.parent)
    pq.write_table(table, path.absolute(), write_page_checksum=True)
    sync(path)
    if not pq.ParquetFile(path.absolute(), page_checksum_verification=True).read().equals(table):
        raise OSError(f"{path.name} does not read as it was written")
