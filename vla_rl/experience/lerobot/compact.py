"""Turning recorded episodes into v3.0 files.

All files are written below ``recording/compacting``, synced and read back.  Then ``committing.json`` lists the files,
they are moved to free names, ``tasks.parquet`` grows, and ``info.json``, which counts the episodes, is replaced: before
that the dataset is the old one plus recorded episodes, after it the new one.  The remaining steps (``stats.json``,
deleting the recorded folders) follow from ``committing.json``.  :func:`recover` undoes or completes the commit of a
killed process.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json
from vla_rl.experience.lerobot import features, live, video
from vla_rl.experience.lerobot.disk import make_folder, move, sync, write_json
from vla_rl.experience.lerobot.features import VERSION, Feature, Schema
from vla_rl.experience.lerobot.live import Header, Limits, LiveEpisode, Metadata, Place

_COMPACTING = "compacting"


def compact(
    root: Path, header: Header, known: Metadata, episodes: Sequence[LiveEpisode], shares: Mapping[str, float]
) -> None:
    """Add verified ``episodes`` to the dataset ``known``; the caller holds the lock and has called :func:`recover`.

    ``shares`` {name: of all episodes} are new splits; {} keeps the old ones.
    """
    schema, limits = header.schema, header.limits
    folder = root / live.RECORDING / _COMPACTING
    first = int(known.info.get("total_frames", 0)) + np.cumsum([0, *(episode.length for episode in episodes)])
    new = [Numbered(item, known.total + i, int(first[i])) for i, item in enumerate(episodes)]
    tasks = live.task_table(known.tasks, header.tasks, *(episode.tasks for episode in episodes))
    numbers = {text: i for i, text in enumerate(tasks)}
    files = {"": _grouped(new, live.FRAMES, _next_place(known, ""), limits.data_mb, limits.files_per_folder)}
    _write_data(folder, schema, numbers, files[""])
    for name in schema.videos:
        begin = _next_place(known, name)
        files[name] = _grouped(new, f"{name}.mp4", begin, limits.video_mb, limits.files_per_folder)
        _write_videos(folder, schema, name, files[name])
    stats = [_all_statistics(item, numbers) for item in new]
    write_rows(folder, root, rows_of(schema, new, files, stats), limits)
    write_tasks(folder, tasks)
    info = _info(known, header, len(tasks), known.total + len(new), int(first[-1]))
    if shares:
        info["splits"] = _new_splits(shares, known.total + len(new))
    whole = features.combined([*([known.stats] if known.total else []), *stats])
    _commit(root, info, whole, [episode.folder.name for episode in episodes])


def recover(root: Path) -> None:
    """Repair a dataset whose writer was killed; no finished episode is lost."""
    recording = root / live.RECORDING
    commit = live.read_committing(recording)
    if commit and live.is_committed(recording, _committed(root)):
        _complete(root, commit)
    elif commit:
        lost = [name for name in commit["folders"] if not (recording / name).is_dir()]
        if lost:
            raise UserError(
                f"{str(root / live.INFO)!r} does not count the episodes of {str(recording / lost[0])!r}, which is "
                "gone, so it is not the one that was last written and nothing was touched; copy it again."
            )
        for name in commit["files"]:
            (root / name).unlink(missing_ok=True)
    (recording / live.COMMITTING).unlink(missing_ok=True)
    shutil.rmtree(recording / _COMPACTING, ignore_errors=True)
    for leftover in recording.glob("episode-*.writing"):
        shutil.rmtree(leftover, ignore_errors=True)


def _commit(root: Path, info: dict[str, Any], stats: features.Stats, folders: list[str]) -> None:
    recording = root / live.RECORDING
    ready = recording / _COMPACTING
    files = sorted(path.relative_to(ready).as_posix() for path in ready.rglob("*") if path.is_file())
    fresh = [name for name in files if name != live.TASKS]
    taken = [name for name in fresh if (root / name).exists()]
    if taken:
        raise UserError(
            f"{str(root / taken[0])!r} exists although {live.INFO} does not mention it, so the recorded episodes "
            "stay where they are; move that file away and repair the dataset again."
        )
    counted = {"total_episodes": info["total_episodes"], "stats": features.to_json(stats)}
    commit = {**counted, "files": fresh, "folders": folders}
    write_json(recording / live.COMMITTING, commit)
    for name in [*fresh, live.TASKS]:
        move(ready / name, root / name)
    write_json(root / live.INFO, info)
    _complete(root, commit)
    (recording / live.COMMITTING).unlink()
    shutil.rmtree(ready)


def _complete(root: Path, commit: Mapping[str, Any]) -> None:
    """The remaining steps once ``info.json`` counts the episodes; repeating them changes nothing."""
    if _committed(root) == commit["total_episodes"]:  # lerobot may have added episodes, with newer statistics
        write_json(root / live.STATS, commit["stats"])
    for name in commit["folders"]:
        folder = root / live.RECORDING / name
        if folder.exists():  # one that cannot be removed must not count as another episode
            shutil.rmtree(folder)


def _committed(root: Path) -> int:
    path = root / live.INFO
    return int(read_json(path)["total_episodes"]) if path.exists() else 0


def _next_place(known: Metadata, column: str) -> Place:
    """The first unused file: adding episodes never changes an existing file."""
    used = [row.videos[column][0] if column else row.data for row in known.rows]
    if not used:
        return Place()
    last = max(used, key=lambda place: (place.chunk, place.file))
    return last.next(int(known.info.get("chunks_size", 1000)))


def _grouped(episodes: Sequence[Numbered], file: str, begin: Place, megabytes: float, files_per_folder: int) -> Groups:
    """Which episodes share a file: it is closed when the next would bring it to ``megabytes``."""
    groups: Groups = {begin: []}
    place, size = begin, 0.0
    for episode in episodes:
        more = episode.live.sizes[file] / MB
        if groups[place] and size + more >= megabytes:
            place, size = place.next(files_per_folder), 0.0
            groups[place] = []
        groups[place].append(episode)
        size += more
    return groups


# -- data and videos ---------------------------------------------------------------------------------------------------


def _write_data(folder: Path, schema: Schema, numbers: Mapping[str, int], groups: Groups) -> None:
    for place, episodes in groups.items():
        path = folder / place.path(live.DATA)
        make_folder(path.parent)
        with pq.ParquetWriter(path, schema.arrow(), compression="snappy", write_page_checksum=True) as file:
            for episode in episodes:
                file.write_table(_frames(schema, episode, numbers), row_group_size=max(episode.live.length, 1))
        sync(path)
        reread = pq.ParquetFile(path, page_checksum_verification=True)
        for i, episode in enumerate(episodes):
            if not reread.read_row_group(i).equals(_frames(schema, episode, numbers)):
                raise OSError(f"{path.name} does not read as it was written")


def _frames(schema: Schema, episode: Numbered, numbers: Mapping[str, int]) -> pa.Table:
    """A recorded table with the indices that it has in the dataset."""
    table = episode.live.table()
    index = _indices(episode, table["task_index"].to_numpy(), numbers)
    arrays = [pa.array(index[name]) if name in index else table[name] for name in schema.arrow().names]
    return pa.table(arrays, schema=schema.arrow())


def _indices(episode: Numbered, task_index: np.ndarray, numbers: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The index columns that depend on the dataset."""
    length = episode.live.length
    return {
        "episode_index": np.full(length, episode.index),
        "index": np.arange(episode.first, episode.first + length),
        "task_index": np.array([numbers[text] for text in episode.live.tasks])[task_index],
    }


def _write_videos(folder: Path, schema: Schema, column: str, groups: Groups) -> None:
    for place, episodes in groups.items():
        path = folder / place.path(live.VIDEO, column)
        make_folder(path.parent)
        video.join([(item.live.video(column), item.live.length) for item in episodes], path, schema.fps)
        sync(path)
        times = video.packet_times(path)
        wanted = np.arange(sum(item.live.length for item in episodes)) / schema.fps
        if len(times) != len(wanted) or np.abs(times - wanted).max() > 1e-5:
            raise OSError(f"the joined video of {column!r} has {len(times)} frames where {len(wanted)} were recorded")


# -- meta --------------------------------------------------------------------------------------------------------------


def _all_statistics(item: Numbered, numbers: Mapping[str, int]) -> features.Stats:
    """The statistics of an episode, those of its index columns included, as lerobot keeps them."""
    indices = _indices(item, item.live.table()["task_index"].to_numpy(), numbers)
    return item.live.stats | features.episode_statistics(indices, {name: Feature("int64") for name in indices})


def _info(known: Metadata, header: Header, tasks: int, episodes: int, frames: int) -> dict[str, Any]:
    info: dict[str, Any] = {
        "codebase_version": VERSION,
        "chunks_size": header.limits.files_per_folder,
        "data_files_size_in_mb": header.limits.data_mb,
        "video_files_size_in_mb": header.limits.video_mb,
        "splits": {},
        "data_path": live.DATA,
        "video_path": live.VIDEO if header.schema.videos else None,
        **header.schema.to_json(),
        **known.info,
    }
    grown = {"total_episodes": episodes, "total_frames": frames, "total_tasks": tasks}
    return info | grown | {"splits": _splits(info["splits"], known.total, episodes)}


def _splits(splits: dict[str, str], before: int, after: int) -> dict[str, str]:
    """New episodes extend the split of the last old one; without any, the split is "train"."""
    last = next((name for name, span in splits.items() if span.endswith(f":{before}")), "train")
    return splits | {last: f"{splits.get(last, '0:').partition(':')[0]}:{after}"}


def _new_splits(shares: Mapping[str, float], episodes: int) -> dict[str, str]:
    ends = [round(float(share) * episodes) for share in np.cumsum(list(shares.values()))]
    return {name: f"{begin}:{end}" for name, begin, end in zip(shares, [0, *ends], ends, strict=False)}


MB = 1 << 20


@dataclass(frozen=True)
class Numbered:
    """A recorded episode with its place in the dataset."""

    live: LiveEpisode
    index: int  # of the episode
    first: int  # of its first frame


Groups: TypeAlias = dict[Place, list[Numbered]]


def rows_of(
    schema: Schema, episodes: Sequence[Numbered], files: Mapping[str, Groups], stats: Sequence[features.Stats]
) -> list[dict[str, Any]]:
    """The rows of ``meta/episodes``, without the place of the rows themselves."""
    places = {
        name: {item.index: place for place, items in groups.items() for item in items} for name, groups in files.items()
    }
    starts = {name: _starts(groups, schema.fps) for name, groups in files.items() if name}
    rows = []
    for item, known in zip(episodes, stats, strict=True):
        row: dict[str, Any] = {
            "episode_index": item.index,
            "tasks": list(item.live.tasks),
            "length": item.live.length,
            "data/chunk_index": places[""][item.index].chunk,
            "data/file_index": places[""][item.index].file,
            "dataset_from_index": item.first,
            "dataset_to_index": item.first + item.live.length,
        }
        for name in schema.videos:
            row[f"videos/{name}/chunk_index"] = places[name][item.index].chunk
            row[f"videos/{name}/file_index"] = places[name][item.index].file
            row[f"videos/{name}/from_timestamp"] = starts[name][item.index]
            row[f"videos/{name}/to_timestamp"] = starts[name][item.index] + item.live.length / schema.fps
        row |= {f"stats/{name}/{key}": value.tolist() for name, part in known.items() for key, value in part.items()}
        rows.append(row)
    return rows


def _starts(groups: Groups, fps: float) -> dict[int, float]:
    starts: dict[int, float] = {}
    for items in groups.values():
        frames = np.cumsum([0, *(item.live.length for item in items)])
        starts |= {item.index: int(before) / fps for item, before in zip(items, frames, strict=False)}
    return starts


def write_rows(folder: Path, root: Path, rows: list[dict[str, Any]], limits: Limits) -> None:
    """Write ``rows`` of new episodes below ``folder``, in files numbered after those of the dataset ``root``."""
    existing = sorted((root / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
    place = Place()
    if existing:
        chunk, file = (int(part.partition("-")[2]) for part in (existing[-1].parent.name, existing[-1].stem))
        place = Place(chunk, file).next(limits.files_per_folder)
    size = pa.Table.from_pylist(rows).nbytes / MB
    per_file = max(1, math.floor(len(rows) * limits.data_mb / size)) if size > limits.data_mb else len(rows)
    for begin in range(0, len(rows), per_file):
        part = rows[begin : begin + per_file]
        own = {"meta/episodes/chunk_index": place.chunk, "meta/episodes/file_index": place.file}
        table = pa.Table.from_pylist([row | own for row in part])
        if existing:
            table = _conformed(table, pq.read_schema(existing[-1]))
        path = folder / place.path(live.EPISODES)
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


def write_tasks(folder: Path, tasks: Sequence[str]) -> None:
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
    _write_table(folder / live.TASKS, pa.table([list(range(len(tasks))), list(tasks)], schema=schema))


def _write_table(path: Path, table: pa.Table) -> None:
    make_folder(path.parent)
    pq.write_table(table, path, write_page_checksum=True)
    sync(path)
    if not pq.ParquetFile(path, page_checksum_verification=True).read().equals(table):
        raise OSError(f"{path.name} does not read as it was written")
