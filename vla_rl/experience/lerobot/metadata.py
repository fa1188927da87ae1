"""Reading ``meta/``: the number of episodes, their tasks, and the files in which they are stored."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, check_memory, read_json
from vla_rl.experience.lerobot import live, statistics
from vla_rl.experience.lerobot.disk import Problem, numbers
from vla_rl.experience.lerobot.features import VERSION, Schema
from vla_rl.experience.lerobot.parquet import ParquetFile

INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES, DATA, VIDEO = f"meta/episodes/{_FILE}.parquet", f"data/{_FILE}.parquet", f"videos/{{video_key}}/{_FILE}.mp4"
# Paths in info.json: inside the dataset, made of a file's numbers and a camera.
_TEMPLATE = re.compile(r"(?:[^{}\0]|\{(?:chunk_index|file_index)(?::0?\d?d)?\}|\{video_key\})+")
_ROW_BYTES = 1000  # of an EpisodeRow
MOST_EPISODES = 10_000_000
# What pyarrow raises for files that are not parquet, truncated or corrupt.
UNREADABLE = (OSError, pa.ArrowException, ValueError)


@dataclass(frozen=True)
class Place:
    """A numbered file of a dataset."""

    chunk: int = 0
    file: int = 0

    def next(self, files_per_folder: int) -> Place:
        """The file after this one."""
        return Place(self.chunk + 1, 0) if self.file + 1 >= files_per_folder else Place(self.chunk, self.file + 1)

    def path(self, template: str, column: str = "") -> str:
        """Relative to the dataset."""
        return template.format(chunk_index=self.chunk, file_index=self.file, video_key=column)


@dataclass(frozen=True)
class EpisodeRow:
    """Where a finished episode is stored: its parquet file, and for each video the file and its start in seconds."""

    index: int
    length: int
    tasks: tuple[str, ...]
    data: Place
    videos: Mapping[str, tuple[Place, float]]


@dataclass(frozen=True)
class Metadata:
    """The content of ``meta/``.  ``total`` episodes are in v3.0 files; only those in ``rows`` can be found.

    Where all are there, ``rows[i]`` is episode ``i``, whatever its ``index`` in the files: numbers may have gaps.
    ``tasks`` holds text ``i`` at place ``i``; it is empty when ``tasks.parquet`` is lost (``problems`` says so).
    """

    root: Path
    info: Mapping[str, Any]
    schema: Schema
    total: int
    tasks: tuple[str, ...]
    rows: tuple[EpisodeRow, ...]
    stats: statistics.Stats = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def data_path(self, row: EpisodeRow) -> str:
        """The parquet with the episode's numbers, relative to the dataset."""
        return row.data.path(self.info.get("data_path") or DATA)

    def video_path(self, row: EpisodeRow, column: str) -> str:
        """The MP4 with the episode's frames of a camera, relative to the dataset."""
        return row.videos[column][0].path(self.info.get("video_path") or VIDEO, column)


def read(root: Path) -> Metadata:
    """Read ``meta/``; a recording that has no v3.0 files yet is a dataset without finished episodes.

    Raises UserError when ``root`` is not a dataset of version 3 or its ``info.json`` is damaged.
    """
    size = check_folder(root)
    if not (root / INFO).exists() and (root / live.RECORDING / live.HEADER).exists():
        header = live.Header.load(root / live.RECORDING)
        return Metadata(root, {}, header.schema, 0, (), ())
    info = _read_info(root)
    try:
        schema, total = Schema.from_json(info), int(info["total_episodes"])
        _check_numbers(info, total)
        problems: list[Problem] = []
        rows = _read_rows(root, info, schema, total, problems)
        total = max(total, len(rows))
        check_memory(schema.frame_bytes * sum(row.length for row in rows), size)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{str(root / INFO)!r} is damaged ({type(error).__name__}: {error}), so the dataset cannot be read; copy "
            "it again."
        ) from error
    tasks, stats = _read_tasks(root, problems), _read_stats(root, total, problems)
    return Metadata(root, info, schema, total, tasks, rows, stats, tuple(problems))


def _read_info(root: Path) -> dict[str, Any]:
    try:
        info = read_json(root / INFO)
        version = str(info["codebase_version"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{str(root)!r} has no {INFO}, so it holds no readable episodes; give the folder of a LeRobotDataset "
            f"{VERSION}, such as 'vla-rl collect' writes."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(root / INFO)!r} is damaged ({type(error).__name__}: {error}), so it holds no readable episodes; "
            "copy it again."
        ) from error
    if not version.startswith("v3."):
        raise UserError(
            f"{str(root)!r} is a LeRobotDataset {version}, which has another file layout; convert it with "
            "lerobot's own script (lerobot.datasets.v30.convert_dataset_v21_to_v30)."
        )
    return dict(info)


def _check_numbers(info: Mapping[str, Any], total: int) -> None:
    """Raise ValueError for paths that lead out of the dataset, and for counts that no dataset has."""
    for name in ("data_path", "video_path"):
        path = info.get(name)
        if path and not (
            isinstance(path, str) and _TEMPLATE.fullmatch(path) and path[0] != "/" and ".." not in path.split("/")
        ):
            raise ValueError(f"its {name} {str(path)[:80]!r} is no path in the dataset")
    if not 0 <= total <= MOST_EPISODES:
        raise ValueError(f"it counts {total} episodes")
    if not 1 <= int(info.get("chunks_size", 1000)) <= MOST_EPISODES:
        raise ValueError(f"its chunks_size is {info['chunks_size']}")
    for span in info.get("splits", {}).values():
        begin, end = str(span).split(":")[0], str(span).split(":")[-1]
        if not 0 <= int(begin) <= int(end) <= MOST_EPISODES:
            raise ValueError(f"it has the split {span!r}")


def _read_rows(
    root: Path, info: Mapping[str, Any], schema: Schema, total: int, problems: list[Problem]
) -> tuple[EpisodeRow, ...]:
    rows: dict[int, EpisodeRow] = {}
    blamed: list[tuple[str, str, str]] = []
    files = {path.relative_to(root).as_posix(): path for path in (root / "meta" / "episodes").glob("*/*.parquet")}
    for name, path in sorted(files.items()):
        try:
            file = ParquetFile(path)
            names = [item for item in file.schema.names if not item.startswith("stats/")]
            check_memory(_ROW_BYTES * file.rows, path.stat().st_size)
            for batch in file.read(names).to_batches(1000):
                rows |= {int(item["episode_index"]): _row(item, schema) for item in batch.to_pylist()}
        except KeyError as error:
            blamed.append((name, "is missing", str(error.args[0])))
        except (*UNREADABLE, TypeError) as error:
            blamed.append((name, f"cannot be read ({_short(error)})", ""))
    finished = not (root / live.RECORDING).exists()  # a commit adds rows first
    if not blamed and (len(rows) == total or (len(rows) > total and finished)):
        # Also numbered with gaps: an episode was deleted, and the others are whole.
        return tuple(row for _, row in sorted(rows.items()))
    lost = tuple(sorted(set(range(total)) - rows.keys()))
    beyond = tuple(sorted(index for index in rows if index >= total))
    if lost and beyond and not blamed:
        what = f"have no such number but {numbers(beyond)}, beyond the {total} of {INFO}; number the episodes from 0"
        blamed.append(("meta/episodes", f"{what}, or {numbers(beyond)} cannot be read either", "episode_index"))
    if lost and not blamed:
        blamed.append((_first_gap(files, info), "is missing", ""))
    problems += [Problem(file, what, lost, column) for file, what, column in blamed]
    return tuple(row for index, row in sorted(rows.items()) if index < total)


def _first_gap(files: Container[str], info: Mapping[str, Any]) -> str:
    place = Place()
    while place.path(EPISODES) in files:
        place = place.next(int(info.get("chunks_size", 1000)))
    return place.path(EPISODES)


def _row(item: Mapping[str, Any], schema: Schema) -> EpisodeRow:
    videos = {
        name: (_place(item, f"videos/{name}"), float(item[f"videos/{name}/from_timestamp"])) for name in schema.videos
    }
    length, starts = int(item["length"]), [start for _, start in videos.values()]
    if length < 0 or not all(math.isfinite(start) for start in starts):
        raise ValueError(f"it has an episode of {length} frames from {starts} s on")
    return EpisodeRow(int(item["episode_index"]), length, tuple(map(str, item["tasks"])), _place(item, "data"), videos)


def _place(item: Mapping[str, Any], name: str) -> Place:
    return Place(int(item[f"{name}/chunk_index"]), int(item[f"{name}/file_index"]))


def _read_tasks(root: Path, problems: list[Problem]) -> tuple[str, ...]:
    """The texts are the index of a pandas frame, whose column has had several names."""
    loss = "so only episodes with one task know its text"
    try:
        file = ParquetFile(root / TASKS)
        table = file.read(file.schema.names)
        texts = [name for name in table.column_names if pa.types.is_string(table.schema.field(name).type)]
        texts += [name for name in table.column_names if pa.types.is_large_string(table.schema.field(name).type)]
        numbered = dict(zip(table["task_index"].to_pylist(), table[texts[0]].to_pylist(), strict=True))
        if sorted(numbered) != list(range(len(numbered))):
            raise ValueError(f"its task_index is {sorted(numbered)}")
        return tuple(numbered[i] for i in range(len(numbered)))
    except FileNotFoundError:
        problems.append(Problem(TASKS, f"is missing, {loss}"))
    except (*UNREADABLE, KeyError, IndexError, TypeError) as error:
        problems.append(Problem(TASKS, f"cannot be read ({_short(error)}), {loss}"))
    return ()


def _read_stats(root: Path, total: int, problems: list[Problem]) -> statistics.Stats:
    commit = live.read_committing(root / live.RECORDING)
    if commit.get("total_episodes") == total:  # killed just before they would have been written
        return statistics.from_json(commit["stats"])
    try:
        return statistics.from_json(read_json(root / STATS))
    except FileNotFoundError:
        problems.append(Problem(STATS, "is missing, so there are no statistics of all episodes"))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problems.append(Problem(STATS, f"cannot be read ({_short(error)}), so there are no statistics of all episodes"))
    return {}


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
