"""What lies in the folder of a dataset beside its finished episodes (``metadata.py``): those that were just recorded.

recording/                  episodes that are not yet in v3.0 files, each complete or absent
  header.json               columns, tasks and limits, so that any process can finish the recording
  episode-000012/           frames.parquet, COLUMN.mp4, and episode.json with their sizes and SHA-256
  episode-000013.writing/   the unfinished episode of a killed process
  committing.json           while v3.0 files are moved into place (``writer.py``): their names and their episodes
  damaged/                  episodes that no longer match their SHA-256; they are never deleted
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import read_json, sync
from vla_rl.experience.lerobot import video
from vla_rl.experience.lerobot.disk import (
    WRITING,
    DamagedError,
    Problem,
    digest,
    make_folder,
    move,
    write_json,
)
from vla_rl.experience.lerobot.features import (
    IMAGE,
    INDEX,
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


@contextmanager
def naming(path: Path, loss: str = "the dataset cannot be read") -> Iterator[None]:
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
        with naming(recording / HEADER, "the episodes beside it have no column types"):
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
    pq.write_table(table, (writing / FRAMES).absolute(), write_page_checksum=True)
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
    with naming(path):
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
