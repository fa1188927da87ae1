"""A dataset with two cameras and a column of every kind, made of formulas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from vla_rl.experience.lerobot.features import Feature, Schema
from vla_rl.experience.lerobot.layout import Limits
from vla_rl.experience.lerobot.reader import DatasetReader, RecordedEpisode
from vla_rl.experience.lerobot.video import camera
from vla_rl.experience.lerobot.writer import DatasetWriter

FPS = 50 / 3  # the tabletop environments'; not a whole number
FRONT, WRIST = "observation.images.front", "observation.images.wrist"
TASKS = ("lift the cube", "öffne die Schublade", "push the plate")
# Smooth pictures through AV1 at lerobot's settings; half-resolution colours make sharp edges worse.
MEAN_ERROR, WORST_ERROR = 2.0, 16


def schema(fps: float = FPS, video: str = "always") -> Schema:
    columns = {
        FRONT: camera((32, 48, 3), fps, video),
        WRIST: camera((16, 20, 3), fps, "never"),
        "observation.state": Feature("float32", (5,), ["a", "b", "c", "d", "e"]),
        "action": Feature("float32", (3,), ["x", "y", "z"]),
        "next.reward": Feature("float32"),
        "next.done": Feature("bool"),
        "complementary_info.seed": Feature("int64"),
        "contacts": Feature("uint8", (4,)),
        "calibration": Feature("float64", (2, 3)),
        "note": Feature("string"),
    }
    return Schema(fps, columns, "arm")


def task(index: int) -> str:
    return TASKS[index % len(TASKS)]


def length(index: int) -> int:
    return 2 + index * 7 % 5


def episode(index: int, frames: int | None = None) -> dict[str, np.ndarray]:
    """The columns of episode ``index``."""
    n = length(index) if frames is None else frames
    random = np.random.default_rng(index)
    return {
        FRONT: pictures((32, 48, 3), index, n),
        WRIST: random.integers(0, 256, (n, 16, 20, 3), dtype=np.uint8),
        "observation.state": random.normal(size=(n, 5)).astype(np.float32),
        "action": random.normal(size=(n, 3)).astype(np.float32),
        "next.reward": random.normal(size=n).astype(np.float32),
        "next.done": np.arange(n) == n - 1,
        "complementary_info.seed": np.full(n, 2**53 + index),
        "contacts": random.integers(0, 256, (n, 4), dtype=np.uint8),
        "calibration": random.normal(size=(n, 2, 3)),
        "note": np.array([f"{index} ✓ {i}" for i in range(n)]),
    }


def pictures(shape: tuple[int, int, int], index: int, frames: int) -> np.ndarray:
    """uint8 [frames,h,w,3]: slopes that say which frame of which episode they are."""
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    slope = 3.0 * rows / shape[0] + (index % 4) * columns / shape[1]
    moving = [
        np.stack([20 * slope + 17 * i, 90 + 9 * slope - 8 * i, slope * 0 + 13 * (index % 15)], -1)
        for i in range(frames)
    ]
    return np.stack(moving).clip(0, 255).astype(np.uint8)


def write(
    root: Path, count: int, first: int = 0, limits: Limits | None = None, video: str = "always", fps: float = FPS
) -> None:
    """Write episodes ``first`` to ``first + count - 1``."""
    with DatasetWriter(root, schema(fps, video), limits=limits) as writer:
        for index in range(first, first + count):
            writer.add(episode(index), task(index))


def write_old(root: Path, count: int, fps: float = FPS, version: str = "v2.1") -> None:
    """Write the episodes 0 to ``count - 1`` as LeRobot 0.3 did: each has files of its own, which lines of JSON list."""
    new = root.with_name(root.name + ".new")
    write(new, count, limits=Limits(1e-6, 1e-6), fps=fps)
    described = pq.read_table(new / "meta/episodes").sort_by("episode_index").to_pylist()
    lines: dict[str, list[dict[str, Any]]] = {"tasks": [], "episodes": [], "episodes_stats": []}
    for i, row in enumerate(described):
        stats: dict[str, dict[str, Any]] = {}
        for name in (name for name in row if name.startswith("stats/")):
            stats.setdefault(name.split("/")[1], {})[name.split("/")[2]] = row[name]
        lines["episodes"].append({"episode_index": i, "tasks": row["tasks"], "length": row["length"]})
        lines["episodes_stats"].append({"episode_index": i, "stats": stats})
        for source, target in old_files(i):
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(new / source, root / target)
    lines["tasks"] = [{"task_index": i, "task": text} for i, text in enumerate(TASKS[:count])]
    (root / "meta").mkdir()
    for name, items in lines.items():
        text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        (root / f"meta/{name}.jsonl").write_text(text, encoding="utf-8")
    known = info(new)
    path, chunk = "episode_{episode_index:06d}", "chunk-{episode_chunk:03d}"
    known |= {"codebase_version": version, "total_videos": count, "total_chunks": 1}
    known |= {"data_path": f"data/{chunk}/{path}.parquet", "video_path": f"videos/{chunk}/{{video_key}}/{path}.mp4"}
    (root / "meta/info.json").write_text(json.dumps(known), encoding="utf-8")
    shutil.rmtree(new)


def old_files(index: int) -> list[tuple[str, str]]:
    """The files of episode ``index``, in v3.0 with an episode in each, and in v2.1."""
    number, name = f"chunk-000/file-{index:03d}", f"episode_{index:06d}"
    data = (f"data/{number}.parquet", f"data/chunk-000/{name}.parquet")
    return [data, (f"videos/{FRONT}/{number}.mp4", f"videos/chunk-000/{FRONT}/{name}.mp4")]


def assert_is(found: RecordedEpisode, index: int) -> None:
    """``found`` is episode ``index``: numbers bit for bit, video within the codec's tolerance."""
    wanted = episode(index)
    assert found.columns.keys() == wanted.keys()
    for name, values in wanted.items():
        read = found.columns[name]
        if name == FRONT:
            off = np.abs(read.astype(int) - values)
            assert read.dtype == np.uint8 and off.mean() <= MEAN_ERROR and off.max() <= WORST_ERROR
        else:
            assert read.shape == values.shape and np.array_equal(read, values), name
            assert read.dtype.kind == values.dtype.kind and (read.dtype == values.dtype or name == "note"), name
    assert [found.tasks[i] for i in found.task] == [task(index)] * len(found.task)
    assert np.array_equal(found.time, np.arange(length(index)))


def assert_holds(root: Path, indices: list[int]) -> None:
    """The dataset at ``root`` has exactly these episodes, in this order, and nothing is wrong with it."""
    reader = DatasetReader(root)
    assert len(reader) == len(indices)
    assert reader.problems == ()
    for found, index in zip(reader.episodes(), indices, strict=True):
        assert_is(found, index)


def files(root: Path, pattern: str) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob(pattern) if path.is_file())


def info(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "meta" / "info.json").read_text(encoding="utf-8"))
    return found
