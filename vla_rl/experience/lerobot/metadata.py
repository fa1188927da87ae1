"""What ``meta/`` says about the finished episodes of a dataset: of v3.0, which is also written, and of v2.1 and v2.0.

v3.0                                        v2.1, v2.0
meta/episodes/chunk-000/file-000.parquet    meta/episodes.jsonl    an episode on each line: its number, length, tasks
meta/tasks.parquet                          meta/tasks.jsonl       a text on each line, with its number
data/chunk-000/file-000.parquet             data/chunk-000/episode_000000.parquet
videos/CAMERA/chunk-000/file-000.mp4        videos/chunk-000/CAMERA/episode_000000.mp4

An episode of v2 has files of its own, numbered like it: v3.0's layout with one episode in each file.  So nothing that
uses :class:`Metadata` knows the version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_file, check_folder, check_memory, parse_json, read_json
from vla_rl.experience.lerobot.disk import Problem, first_line, numbers
from vla_rl.experience.lerobot.features import VERSION, Schema, Stats, stats_from_json
from vla_rl.experience.lerobot.layout import HEADER, RECORDING, Header, naming, read_committing
from vla_rl.experience.lerobot.parquet import ParquetFile

INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES, DATA, VIDEO = f"meta/episodes/{_FILE}.parquet", f"data/{_FILE}.parquet", f"videos/{{video_key}}/{_FILE}.mp4"
FRAMES, VIDEOS, _LANCE = "frames.lance", "videos.lance", "lance"  # tables in the place of such files
_EPISODES_2, _TASKS_2 = "meta/episodes.jsonl", "meta/tasks.jsonl"
_CHUNK, _EPISODE = "chunk-{episode_chunk:03d}", "episode_{episode_index:06d}"
_PATHS_2 = {
    "data_path": f"data/{_CHUNK}/{_EPISODE}.parquet",
    "video_path": f"videos/{_CHUNK}/{{video_key}}/{_EPISODE}.mp4",
}
_OLD = ("v2.0", "v2.1")
# Paths in info.json: inside the dataset, made of a file's numbers and a camera.
_NUMBER = r"\{(?:chunk_index|file_index|episode_chunk|episode_index)(?::0?\d?d)?\}"
_TEMPLATE = re.compile(rf"(?:[^{{}}\0]|{_NUMBER}|\{{video_key\}})+")
_ROW_BYTES = 1000  # of an EpisodeRow
MOST_EPISODES = 10_000_000
# What pyarrow raises for files that are not parquet, truncated or corrupt.
UNREADABLE = (OSError, pa.ArrowException, ValueError)
_WRONG = (ValueError, KeyError, TypeError, AttributeError, OverflowError)  # what JSON of others raises where it is used


@dataclass(frozen=True)
class Place:
    """A numbered file of a dataset; in v2 its number is the episode's."""

    chunk: int = 0
    file: int = 0

    def next(self, files_per_folder: int) -> Place:
        return Place(self.chunk + 1, 0) if self.file + 1 >= files_per_folder else Place(self.chunk, self.file + 1)

    def path(self, template: str, column: str = "") -> str:
        given = {"chunk_index": self.chunk, "file_index": self.file}
        given |= {"episode_chunk": self.chunk, "episode_index": self.file}
        return template.format(video_key=column, **given)


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
    """The content of ``meta/``.  ``total`` episodes are in finished files; only those in ``rows`` can be found.

    Where all are there, ``rows[i]`` is episode ``i``, whatever its ``index`` in the files: numbers may have gaps.
    ``tasks`` holds text ``i`` at place ``i``; it is empty when their file is lost (``problems`` says so).
    """

    root: Path
    info: Mapping[str, Any]
    schema: Schema
    total: int
    tasks: tuple[str, ...]
    rows: tuple[EpisodeRow, ...]
    stats: Stats = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    size: int = 0  # bytes of the files that are there

    @property
    def version(self) -> str:
        return str(self.info.get("codebase_version", VERSION))

    @property
    def is_old(self) -> bool:
        """Whether it is of a version before v3.0, which is read only."""
        return self.version in _OLD

    @property
    def is_lance(self) -> bool:
        """Whether its frames and videos are in Lance tables, which are read only."""
        return self.info.get("storage_format") == _LANCE

    @property
    def tasks_file(self) -> str:
        return _TASKS_2 if self.is_old else TASKS

    def data_path(self, row: EpisodeRow) -> str:
        """The parquet with the episode's numbers, relative to the dataset."""
        return row.data.path(self.info.get("data_path") or DATA)

    def video_path(self, row: EpisodeRow, column: str) -> str:
        """The MP4 with the episode's frames of a camera, relative to the dataset."""
        return row.videos[column][0].path(self.info.get("video_path") or VIDEO, column)

    def require_memory(self, rows: Iterable[EpisodeRow], frame_bytes: int) -> None:
        """Raise UserError where ``rows``, at so many bytes a frame, take memory that the files do not explain."""
        with naming(self.root / INFO):
            check_memory(frame_bytes * sum(row.length for row in rows), self.size)


def read_metadata(root: Path) -> Metadata:
    """Read ``meta/``; a recording that has no finished files yet is a dataset without finished episodes.

    Raises UserError when ``root`` is not a dataset of version 2 or 3 or its ``info.json`` is damaged.
    """
    size = check_folder(root)
    if not (root / INFO).exists() and (root / RECORDING / HEADER).exists():
        header = Header.load(root / RECORDING)
        return Metadata(root, {}, header.schema, 0, (), ())
    info = _read_info(root)
    problems: list[Problem] = []
    old = info["codebase_version"] in _OLD
    with naming(root / INFO):
        schema, total = Schema.from_json(info), int(info["total_episodes"])
        _check_numbers(info, total)
        rows = (_old_rows if old else _new_rows)(root, info, schema, total, problems)
        total = max(total, len(rows))
    tasks = (_old_tasks if old else _new_tasks)(root, problems)
    stats = {} if old else _read_stats(root, total, problems)
    return Metadata(root, info, schema, total, tasks, rows, stats, tuple(problems), size)


def _read_info(root: Path) -> dict[str, Any]:
    if not (root / INFO).exists():
        raise UserError(
            f"{str(root)!r} has no {INFO}, so it holds no readable episodes; give the folder of a LeRobotDataset "
            f"{VERSION}, such as 'vla-rl collect' writes."
        )
    with naming(root / INFO, "it holds no readable episodes"):
        info = dict(read_json(root / INFO))
        version = str(info["codebase_version"])
    if (stored := info.get("storage_format", "parquet")) not in ("parquet", _LANCE):
        raise UserError(
            f"{str(root)!r} is stored as {str(stored)[:40]!r}, which is not read; name the dataset of parquet files "
            "and videos that it was made of."
        )
    if stored == _LANCE:
        info |= {"data_path": FRAMES, "video_path": VIDEOS}
    if version in _OLD:
        return {**info, **{name: info.get(name) or path for name, path in _PATHS_2.items()}}
    if not version.startswith("v3."):
        raise UserError(
            f"{str(root)!r} is a LeRobotDataset {version}, which has another file layout than v3.0, {_OLD[1]} and "
            f"{_OLD[0]}, so it is not read; convert it with the lerobot that wrote it, or a later one."
        )
    return info


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


@dataclass
class _Listed:
    """Rows by their numbers, and what is wrong with them: (file, what, column); ``absent`` where one has no row."""

    file: str
    absent: tuple[str, str]
    rows: dict[int, EpisodeRow] = field(default_factory=dict)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    def found(self, total: int, finished: bool, problems: list[Problem]) -> tuple[EpisodeRow, ...]:
        """The rows of ``total`` episodes, or of more where all are ``finished``; what is wrong joins ``problems``."""
        if not self.wrong and (len(self.rows) == total or (len(self.rows) > total and finished)):
            # Also numbered with gaps: an episode was deleted, and the others are whole.
            return tuple(row for _, row in sorted(self.rows.items()))
        lost = tuple(sorted(set(range(total)) - self.rows.keys()))
        beyond = tuple(sorted(index for index in self.rows if index >= total)) if lost else ()
        wrong = self.wrong
        if beyond and not wrong:
            what = f"has no such number but {numbers(beyond)}, beyond the {total} of {INFO}; number the episodes from 0"
            wrong = [(self.file, f"{what}, or {numbers(beyond)} cannot be read either", "episode_index")]
        elif beyond:
            wrong = [(file, f"{what}, nor can {numbers(beyond)} be placed", column) for file, what, column in wrong]
        if lost and not wrong:
            wrong = [(*self.absent, "")]
        problems += [Problem(file, what, lost, column) for file, what, column in wrong]
        return tuple(row for index, row in sorted(self.rows.items()) if index < total)


def _new_rows(
    root: Path, info: Mapping[str, Any], schema: Schema, total: int, problems: list[Problem]
) -> tuple[EpisodeRow, ...]:
    files = {path.relative_to(root).as_posix(): path for path in (root / "meta" / "episodes").glob("*/*.parquet")}
    listed = _Listed("meta/episodes", (_first_gap(files, info), "is missing"))
    for name, path in sorted(files.items()):
        try:
            file = ParquetFile(path)
            names = [item for item in file.schema.names if not item.startswith("stats/")]
            check_memory(_ROW_BYTES * file.rows, path.stat().st_size)
            for batch in file.read(names).to_batches(1000):
                listed.rows |= {int(item["episode_index"]): _row(item, schema) for item in batch.to_pylist()}
        except KeyError as error:
            listed.wrong.append((name, "is missing", str(error.args[0])))
        except (*UNREADABLE, TypeError) as error:
            listed.wrong.append((name, f"cannot be read ({first_line(error)})", ""))
    return listed.found(total, not (root / RECORDING).exists(), problems)  # a commit adds rows first


def _old_rows(
    root: Path, info: Mapping[str, Any], schema: Schema, total: int, problems: list[Problem]
) -> tuple[EpisodeRow, ...]:
    listed = _Listed(_EPISODES_2, (_EPISODES_2, "has no line about what info.json counts"))

    def add(item: Mapping[str, Any]) -> None:
        index, length, texts = int(item["episode_index"]), int(item["length"]), item["tasks"]
        if not 0 <= index < MOST_EPISODES or length < 0:
            raise ValueError(f"episode {index} of {length} frames")
        place = Place(index // int(info.get("chunks_size", 1000)), index)
        tasks = (texts,) if isinstance(texts, str) else tuple(map(str, texts))
        listed.rows[index] = EpisodeRow(index, length, tasks, place, dict.fromkeys(schema.videos, (place, 0.0)))

    listed.wrong = [(_EPISODES_2, what, "") for what in _damaged_lines(root / _EPISODES_2, add)]
    return listed.found(total, True, problems)


def _damaged_lines(path: Path, use: Callable[[Any], object]) -> list[str]:
    """Have the JSON on each line of ``path`` used; what is wrong with the file or with those that cannot be."""
    wrong = []
    try:
        check_file(path)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        use(parse_json(line))
                except _WRONG as error:
                    wrong.append(f"cannot be read in line {number} ({type(error).__name__}: {first_line(error)})")
    except FileNotFoundError:
        wrong.append("is missing")
    except (OSError, ValueError) as error:
        wrong.append(f"cannot be read ({first_line(error)})")
    return wrong


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


_LOSS = "so only episodes with one task know its text"


def _new_tasks(root: Path, problems: list[Problem]) -> tuple[str, ...]:
    """The texts are the index of a pandas frame, whose column has had several names."""
    try:
        file = ParquetFile(root / TASKS)
        table = file.read(file.schema.names)
        texts = [name for name in table.column_names if pa.types.is_string(table.schema.field(name).type)]
        texts += [name for name in table.column_names if pa.types.is_large_string(table.schema.field(name).type)]
        return _numbered(dict(zip(table["task_index"].to_pylist(), table[texts[0]].to_pylist(), strict=True)))
    except FileNotFoundError:
        problems.append(Problem(TASKS, f"is missing, {_LOSS}"))
    except (*UNREADABLE, KeyError, IndexError, TypeError) as error:
        problems.append(Problem(TASKS, f"cannot be read ({first_line(error)}), {_LOSS}"))
    return ()


def _old_tasks(root: Path, problems: list[Problem]) -> tuple[str, ...]:
    texts: dict[int, str] = {}
    wrong = _damaged_lines(root / _TASKS_2, lambda item: texts.update({int(item["task_index"]): str(item["task"])}))
    try:
        tasks = _numbered(texts)
    except ValueError as error:
        wrong, tasks = [*wrong, f"cannot be used ({error})"], ()
    problems += [Problem(_TASKS_2, f"{what}, {_LOSS}") for what in wrong[:1]]
    return () if wrong else tasks


def _numbered(texts: Mapping[int, str]) -> tuple[str, ...]:
    if sorted(texts) != list(range(len(texts))):
        raise ValueError(f"its task_index is {sorted(texts)}")
    return tuple(texts[i] for i in range(len(texts)))


def _read_stats(root: Path, total: int, problems: list[Problem]) -> Stats:
    commit = read_committing(root / RECORDING)
    if commit.get("total_episodes") == total:  # killed just before they would have been written
        return stats_from_json(commit["stats"])
    try:
        return stats_from_json(read_json(root / STATS))
    except FileNotFoundError:
        problems.append(Problem(STATS, "is missing, so there are no statistics of all episodes"))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        problems.append(
            Problem(STATS, f"cannot be read ({first_line(error)}), so there are no statistics of all episodes")
        )
    return {}
