"""Writing the parquet files of ``meta/``: where each episode is stored, and the texts of the tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.experience.lerobot import metadata, statistics
from vla_rl.experience.lerobot.disk import make_folder, sync
from vla_rl.experience.lerobot.features import Schema
from vla_rl.experience.lerobot.live import Limits, LiveEpisode
from vla_rl.experience.lerobot.metadata import Place

MB = 1 << 20


@dataclass(frozen=True)
class Numbered:
    """A recorded episode with its place in the dataset."""

    live: LiveEpisode
    index: int  # of the episode
    first: int  # of its first frame


Groups: TypeAlias = dict[Place, list[Numbered]]


def rows_of(
    schema: Schema, episodes: Sequence[Numbered], files: Mapping[str, Groups], stats: Sequence[statistics.Stats]
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
    _write_table(folder / metadata.TASKS, pa.table([list(range(len(tasks))), list(tasks)], schema=schema))


def _write_table(path: Path, table: pa.Table) -> None:
    make_folder(path.parent)
    pq.write_table(table, path, write_page_checksum=True)
    sync(path)
    if not pq.ParquetFile(path, page_checksum_verification=True).read().equals(table):
        raise OSError(f"{path.name} does not read as it was written")
