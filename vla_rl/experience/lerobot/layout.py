"""What lies in the folder of a dataset: finished episodes, which meta/ describes, and recorded ones.

meta/                       info.json, stats.json, tasks.parquet, episodes/: counts, tasks, the place of each episode
recording/                  episodes that are not yet in v3.0 files, each complete or absent
  header.json               columns, tasks and limits, so that any process can finish the recording
  episode-000012/           frames.parquet, COLUMN.mp4, and episode.json with their sizes and SHA-256
  episode-000013.writing/   the unfinished episode of a killed process
  committing.json           while v3.0 files are moved into place (``writer.py``): their names and their episodes
  damaged/                  episodes that no longer match their SHA-256; they are never deleted
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, check_memory, read_json, sync
from vla_rl.experience.lerobot import video
from vla_rl.experience.lerobot.disk import (
    WRITING,
    DamagedError,
    Problem,
    digest,
    first_line,
    make_folder,
    move,
    numbers,
    write_json,
)
from vla_rl.experience.lerobot.features import (
    IMAGE,
    INDEX,
    VERSION,
    Feature,
    Schema,
    Stats,
    episode_statistics,
    stats_from_json,
    stats_to_json,
    to_arrow,
)
from vla_rl.experience.lerobot.parquet import ParquetFile

RECORDING, HEADER, MANIFEST, FRAMES = "recording", "header.json", "episode.json", "frames.parquet"
COMMITTING, DAMAGED = "committing.json", "damaged"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
EPISODES, DATA, VIDEO = f"meta/episodes/{_FILE}.parquet", f"data/{_FILE}.parquet", f"videos/{{video_key}}/{_FILE}.mp4"
# Paths in info.json: inside the dataset, made of a file's numbers and a camera.
_TEMPLATE = re.compile(r"(?:[^{}\0]|\{(?:chunk_index|file_index)(?::0?\d?d)?\}|\{video_key\})+")
_ROW_BYTES = 1000  # of an EpisodeRow
MOST_EPISODES = 10_000_000
# What pyarrow raises for files that are not parquet, truncated or corrupt.
UNREADABLE = (OSError, pa.ArrowException, ValueError)


@contextmanager
def _naming(path: Path, loss: str = "the dataset cannot be read") -> Iterator[None]:
    """Raise UserError, which names ``path``, where it is damaged."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}), so {loss}; copy it again."
        ) from error


@dataclass(frozen=True)
class Limits:
    """A file is closed before the next episode would make it larger; a folder holds at most this many files."""

    data_mb: float = 100
    video_mb: float = 200
    files_per_folder: int = 1000


@dataclass(frozen=True)
class Header:
    """Columns, tasks and limits of a recording: enough for another process to finish it."""

    schema: Schema
    tasks: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def save(self, recording: Path) -> None:
        limits = vars(self.limits)
        write_json(recording / HEADER, {**self.schema.to_json(), "tasks": list(self.tasks), "limits": limits})

    @classmethod
    def load(cls, recording: Path) -> Header:
        """Read ``header.json``; raises UserError when it is missing or damaged."""
        with _naming(recording / HEADER, "the episodes beside it have no column types"):
            data = read_json(recording / HEADER)
            return cls(Schema.from_json(data), tuple(data["tasks"]), Limits(**data["limits"]))


@dataclass(frozen=True)
class LiveEpisode:
    """A verified episode folder; its ``task_index`` counts in ``tasks``, ``sizes`` are the bytes of each file."""

    folder: Path
    length: int
    tasks: tuple[str, ...]
    stats: Stats
    sizes: Mapping[str, int]

    def table(self) -> pa.Table:
        """All columns but videos; of ``INDEX`` those that do not depend on the dataset."""
        file = ParquetFile(self.folder / FRAMES)
        return file.read(file.schema.names)

    def video(self, column: str) -> Path:
        return self.folder / f"{column}.mp4"


def write_episode(
    folder: Path, schema: Schema, columns: Mapping[str, np.ndarray], tasks: Sequence[str], task_index: np.ndarray
) -> None:
    """Write one episode atomically: ``folder`` is complete or does not exist."""
    writing = folder.with_name(folder.name + WRITING)
    shutil.rmtree(writing, ignore_errors=True)
    make_folder(writing)
    length = len(task_index)
    frames = np.arange(length)
    index: dict[str, np.ndarray] = {"timestamp": (frames / schema.fps).astype(np.float32), "frame_index": frames}
    for name in schema.videos:
        codec = video.codec_of(schema.features[name])
        video.encode(writing / f"{name}.mp4", columns[name], schema.fps, codec)
        if len(video.packet_times(writing / f"{name}.mp4")) != length:
            raise OSError(f"the encoder lost frames of {name!r}")
    table = _table(schema, {**columns, **index, "task_index": task_index})
    pq.write_table(table, writing / FRAMES, write_page_checksum=True)
    features = {**schema.features, **{name: Feature(INDEX[name]) for name in index}}
    stats = episode_statistics({**columns, **index}, features)
    manifest: dict[str, Any] = {"length": length, "tasks": list(tasks), "files": {}}
    for file in sorted(writing.iterdir()):
        sync(file)
        manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": digest(file)}
    write_json(writing / MANIFEST, manifest | {"stats": stats_to_json(stats)})
    move(writing, folder)


def load_episode(folder: Path, root: Path, number: int) -> LiveEpisode:
    """Verify a folder against its manifest; raises DamagedError, which names it episode ``number``."""

    def damaged(file: str, what: str) -> DamagedError:
        return DamagedError(root, Problem((folder / file).relative_to(root).as_posix(), what, (number,)))

    try:
        manifest = read_json(folder / MANIFEST)
        length, tasks = int(manifest["length"]), tuple(manifest["tasks"])
        stats = stats_from_json(manifest["stats"])
        files = {name: (int(file["bytes"]), str(file["sha256"])) for name, file in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(MANIFEST, f"cannot be read ({type(error).__name__}: {error})") from error
    for name, (size, sha256) in {FRAMES: (0, ""), **files}.items():
        path = folder / name
        if "/" in name:
            raise damaged(MANIFEST, f"names {name!r}, which is no file beside it")
        if not path.is_file():
            raise damaged(name, "is missing")
        if path.stat().st_size != size or digest(path) != sha256:
            raise damaged(name, "is not what was recorded (its SHA-256 differs)")
    return LiveEpisode(folder, length, tasks, stats, {name: size for name, (size, _) in files.items()})


def folders(root: Path, committed: int) -> list[Path]:
    """The folders of episodes that ``committed``, the count in ``info.json``, does not include, oldest first."""
    recording = root / RECORDING
    done = set(read_committing(recording).get("folders", ())) if is_committed(recording, committed) else set()
    found = [path for path in recording.glob("episode-*") if path.is_dir() and path.suffix != WRITING]
    return sorted((path for path in found if path.name not in done), key=_number)


def next_folder(root: Path, committed: int) -> Path:
    """The folder of the next episode, numbered after all existing ones."""
    recording = root / RECORDING
    taken = [_number(path) for parent in (recording, recording / DAMAGED) for path in parent.glob("episode-*")]
    return recording / f"episode-{max([committed - 1, *taken]) + 1:06d}"


def is_blank(recording: Path) -> bool:
    """Whether a process was killed before it had written the header."""
    kept = any(recording.glob("episode-*")) or (recording / DAMAGED).exists()
    return not kept and not (recording / HEADER).exists()


def read_committing(recording: Path) -> dict[str, Any]:
    """The commit that a killed process had begun; {} when there is none."""
    path = recording / COMMITTING
    if not path.exists():
        return {}
    with _naming(path):
        commit = read_json(path)
        int(commit["total_episodes"]), stats_from_json(commit["stats"])
        folders, files = commit["folders"], commit["files"]
        for name in (*(f"./{name}" if name.startswith("episode-") else "/" for name in folders), *files):
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError("it names what is not in the dataset")
    return dict(commit)


def is_committed(recording: Path, committed: int) -> bool:
    """Whether ``info.json`` counts what ``committing.json`` lists; it counts more if lerobot has added episodes."""
    return committed >= read_committing(recording).get("total_episodes", float("inf"))


def task_table(*groups: Iterable[str]) -> tuple[str, ...]:
    """All texts once, in the order in which they first occur."""
    return tuple(dict.fromkeys(text for group in groups for text in group))


def _table(schema: Schema, columns: Mapping[str, np.ndarray]) -> pa.Table:
    """The columns that parquet holds, pictures as PNG."""
    arrays = {}
    for name, feature in schema.stored().items():
        if feature.dtype == "image":
            pictures = [video.encode_png(frame) for frame in columns[name]]
            named = [{"bytes": data, "path": f"frame-{i:06d}.png"} for i, data in enumerate(pictures)]
            arrays[name] = pa.array(named, IMAGE)
        elif name in columns:
            arrays[name] = to_arrow(feature, columns[name])
    return pa.table(arrays)


def _number(folder: Path) -> int:
    digits = folder.name.removesuffix(WRITING).partition("-")[2]
    return int(digits) if digits.isdigit() else -1


@dataclass(frozen=True)
class Place:
    """A numbered file of a dataset."""

    chunk: int = 0
    file: int = 0

    def next(self, files_per_folder: int) -> Place:
        return Place(self.chunk + 1, 0) if self.file + 1 >= files_per_folder else Place(self.chunk, self.file + 1)

    def path(self, template: str, column: str = "") -> str:
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
    stats: Stats = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    size: int = 0  # bytes of the files that are there

    def data_path(self, row: EpisodeRow) -> str:
        """The parquet with the episode's numbers, relative to the dataset."""
        return row.data.path(self.info.get("data_path") or DATA)

    def video_path(self, row: EpisodeRow, column: str) -> str:
        """The MP4 with the episode's frames of a camera, relative to the dataset."""
        return row.videos[column][0].path(self.info.get("video_path") or VIDEO, column)

    def require_memory(self, rows: Iterable[EpisodeRow], frame_bytes: int) -> None:
        """Raise UserError where ``rows``, at so many bytes a frame, take memory that the files do not explain."""
        with _naming(self.root / INFO):
            check_memory(frame_bytes * sum(row.length for row in rows), self.size)


def read_metadata(root: Path) -> Metadata:
    """Read ``meta/``; a recording that has no v3.0 files yet is a dataset without finished episodes.

    Raises UserError when ``root`` is not a dataset of version 3 or its ``info.json`` is damaged.
    """
    size = check_folder(root)
    if not (root / INFO).exists() and (root / RECORDING / HEADER).exists():
        header = Header.load(root / RECORDING)
        return Metadata(root, {}, header.schema, 0, (), ())
    info = _read_info(root)
    with _naming(root / INFO):
        schema, total = Schema.from_json(info), int(info["total_episodes"])
        _check_numbers(info, total)
        problems: list[Problem] = []
        rows = _read_rows(root, info, schema, total, problems)
        total = max(total, len(rows))
    tasks, stats = _read_tasks(root, problems), _read_stats(root, total, problems)
    return Metadata(root, info, schema, total, tasks, rows, stats, tuple(problems), size)


def _read_info(root: Path) -> dict[str, Any]:
    if not (root / INFO).exists():
        raise UserError(
            f"{str(root)!r} has no {INFO}, so it holds no readable episodes; give the folder of a LeRobotDataset "
            f"{VERSION}, such as 'vla-rl collect' writes."
        )
    with _naming(root / INFO, "it holds no readable episodes"):
        info = read_json(root / INFO)
        version = str(info["codebase_version"])
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
            blamed.append((name, f"cannot be read ({first_line(error)})", ""))
    finished = not (root / RECORDING).exists()  # a commit adds rows first
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
        problems.append(Problem(TASKS, f"cannot be read ({first_line(error)}), {loss}"))
    return ()


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
