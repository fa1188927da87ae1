"""A damaged dataset: what is wrong is named (file, column, episodes), and everything else is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.experience import lerobot_makers as makers
from tests.experience.lerobot_makers import FRONT, WRIST, assert_is, schema, write
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.lerobot.disk import DamagedError, Problem
from vla_rl.experience.lerobot.features import Feature, fits
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.experience.lerobot.writer import DatasetWriter

COUNT = 6
FIRST, SECOND = "data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet"
FILM = f"videos/{FRONT}/chunk-000/file-000.mp4"
EPISODES_FILE = "meta/episodes/chunk-000/file-000.parquet"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Six episodes: two in each of three parquet files, each with its video."""
    root = tmp_path_factory.mktemp("whole") / "set"
    for first in (0, 2, 4):
        write(root, 2, first=first)
    return root


@pytest.fixture
def root(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "set")


def sound(root: Path, chosen: Iterable[int] | None = None) -> tuple[list[int], list[Problem]]:
    """The episodes that are read, each as it was written, and what is damaged."""
    read, problems = [], list[Problem]()
    for found in DatasetReader(root).episodes(chosen, on_damage=problems.append):
        assert_is(found, found.index)
        read.append(found.index)
    return read, problems


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def flip(place: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(len(data) * place)] ^= 0x55
        path.write_bytes(bytes(data))

    return change


def rewrite(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda path: pq.write_table(change(pq.read_table(path)), path, row_group_size=2)


def with_column(name: str, make: Callable[[pa.ChunkedArray], pa.Array]) -> Callable[[Path], None]:
    return rewrite(lambda table: table.set_column(table.column_names.index(name), name, make(table[name])))


def holed(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([None, *column.to_pylist()[1:]], column.type)


def texts(column: pa.ChunkedArray) -> pa.Array:
    return pa.array(["up"] * len(column))


def ragged(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([[0.0] * 2] * len(column), pa.list_(pa.float32()))


def half_a_picture(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([{"bytes": b"\x89PNG nothing", "path": ""}, *column.to_pylist()[1:]], column.type)


def slower(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([1.2 * time for time in column.to_pylist()], pa.float32())


# What is damaged, how, which column of it is blamed for what, and the episodes that are lost.
DAMAGES: dict[str, tuple[str, Callable[[Path], None], str, str, set[int]]] = {
    "no parquet": (SECOND, Path.unlink, "", "is missing", {2, 3}),
    "half a parquet": (SECOND, cut(0.5), "", r"cannot be read \(Parquet magic bytes not found in footer", {2, 3}),
    "no video": (FILM, Path.unlink, FRONT, "is missing", {0, 1}),
    "a text for a video": (FILM, lambda path: path.write_text("no" * 999), FRONT, r"cannot be decoded \(", {0, 1}),
    "no column": (FIRST, rewrite(lambda table: table.drop_columns(["action"])), "action", "is missing", {0, 1}),
    "another type": (FIRST, with_column("action", texts), "action", r"is string where float32 \[3\] is decl", {0, 1}),
    "other lengths": (FIRST, with_column("action", ragged), "action", r"holds \d+ numbers, not \d frames of", {0, 1}),
    "no value": (FIRST, with_column("action", holed), "action", "has no value in 1 of", {0}),
    "no picture": (FIRST, with_column(WRIST, holed), WRIST, "has no picture in frame 0", {0}),
    "half a picture": (FIRST, with_column(WRIST, half_a_picture), WRIST, "holds a picture that cannot be decoded", {0}),
    "a frame too few": (FIRST, rewrite(lambda table: table.slice(1)), "", "holds 1 frames of episode 0 where", {0}),
    "a frame twice": (
        FIRST,
        with_column("frame_index", lambda column: pa.array([0, 0, *column.to_pylist()[2:]])),
        "frame_index",
        "counts 0, 0, so frames are missing, double or out of order",
        {0},
    ),
    "a fifth slower": (FIRST, with_column("timestamp", slower), "timestamp", "has a frame every 0.072 s where", {0, 1}),
    "a task that is not": (
        FIRST,
        with_column("task_index", lambda column: pa.array([7] * len(column))),
        "task_index",
        "counts to 7 but meta/tasks.parquet has 3 texts",
        {0, 1},
    ),
    "no list of episodes": (EPISODES_FILE, Path.unlink, "", "is missing", {0, 1}),
    "half a list of episodes": (EPISODES_FILE, cut(0.5), "", r"cannot be read \(", {0, 1}),
    "a list without a column": (
        EPISODES_FILE,
        rewrite(lambda table: table.drop_columns(["data/file_index"])),
        "data/file_index",
        "is missing",
        {0, 1},
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_rest_is_read(root, name):
    file, change, column, what, lost = DAMAGES[name]
    change(root / file)
    read, problems = sound(root)
    assert lost == set(range(COUNT)) - set(read) == {episode for problem in problems for episode in problem.episodes}
    assert {(problem.file, problem.column) for problem in problems} == {(file, column)}
    location = f"'{file}', column '{column}'," if column else f"'{file}'"
    with pytest.raises(DamagedError, match=f"{location} {what}.*so episodes? .* cannot be read; copy the file again"):
        list(DatasetReader(root).episodes())


def test_what_a_cut_video_still_holds_is_read(root):
    """Its index comes first, so a cut costs only the episodes behind it."""
    write(root / "one", 6)
    path = root / "one" / FILM
    cut(0.7)(path)
    read, problems = sound(root / "one")
    assert {(problem.file, problem.column) for problem in problems} == {(FILM, FRONT)}
    assert 0 < len(read) < 6 and read == list(range(len(read))), "the end is gone"


def test_a_video_that_is_cut_anywhere_is_read_or_named(root):
    """Somewhere in its index ffmpeg finds a stream and no codec."""
    path = next(root.rglob("*.mp4"))
    before = path.read_bytes()
    for size in range(0, len(before), 97):
        path.write_bytes(before[:size])
        sound(root)


def test_a_flipped_bit_never_changes_a_number_silently(whole, tmp_path):
    """The pages of our parquet files have checksums; what is not blamed is as it was."""
    root, noticed = shutil.copytree(whole, tmp_path / "set"), 0
    before = (root / FIRST).read_bytes()
    for place in range(1, 24, 2):
        (root / FIRST).write_bytes(before)
        flip(place / 32)(root / FIRST)
        noticed += bool(sound(root, [0, 1])[1])
    assert noticed > 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "has no meta/info.json, so it holds no readable episodes"),
        ("{", "info.json' is damaged .*copy it again"),
        ('{"codebase_version": "v3.0"}', "info.json' is damaged .*cannot be read"),
        ('{"codebase_version": "v1.6"}', "is a LeRobotDataset v1.6, which has another file layout.*convert it"),
    ],
)
def test_a_folder_whose_columns_are_unknown_is_refused(root, text, sentence):
    path = root / "meta" / "info.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        DatasetReader(root)


def test_damaged_episodes_are_left_out_only_when_that_is_said(root):
    cut(0.5)(root / SECOND)
    (root / "meta" / "stats.json").write_text("{")  # costs nothing but the statistics
    with pytest.raises(DamagedError, match=r"file-001.parquet' cannot be read"):
        load_demonstrations(root)
    problems: list[Problem] = []
    assert load_demonstrations(root, on_damage=problems.append).count == 4
    assert [problem.episodes for problem in problems] == [(2,), (3,)]
    assert load_demonstrations(root, episodes=[0, 5]).count == 2, "those that were not asked for do not matter"
    shutil.rmtree(root / "data")
    with pytest.raises(UserError, match="holds no readable episodes"):
        load_demonstrations(root, on_damage=problems.append)
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"].pop("action")
    (root / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="has no column 'action', so there is nothing to imitate"):
        load_demonstrations(root)


@pytest.mark.parametrize(
    ("right", "types"),
    [
        (True, [pa.list_(pa.float32()), pa.list_(pa.float64(), 3), pa.large_list(pa.float32())]),
        (False, [pa.list_(pa.float32(), 2), pa.list_(pa.int32(), 3), pa.list_(pa.list_(pa.float32(), 3)), pa.string()]),
    ],
)
def test_a_column_may_differ_in_precision_alone(right, types):
    assert {fits(Feature("float32", (3,)), found) for found in types} == {right}


def test_an_episode_of_one_task_needs_no_table_of_tasks(root):
    (root / "meta" / "tasks.parquet").unlink()
    with pytest.raises(DamagedError, match=r"'meta/tasks.parquet' is missing, so only episodes with one task know its"):
        list(DatasetReader(root).episodes())
    read, problems = sound(root)
    assert len(read) == COUNT and [problem.file for problem in problems] == ["meta/tasks.parquet"]


def test_what_other_writers_do_differently_is_read(root):
    """One number as a list, numbered texts, nothing where there is no number, a clock that paused, fewer counted."""

    def change(table: pa.Table) -> pa.Table:
        rewards, notes = table["next.reward"].to_pylist(), table["note"].to_pylist()
        values = {
            "next.reward": pa.array([[one] for one in rewards], pa.list_(pa.float32())),
            "note": pa.array([None, *notes[1:]]).dictionary_encode(),
            "timestamp": pa.array([one + 9 * (one > 0) for one in table["timestamp"].to_pylist()], pa.float32()),
            "calibration": pa.array([[[None] * 3] * 2] * len(table), pa.list_(pa.list_(pa.float64()))),
        }
        for name, value in values.items():
            table = table.set_column(table.column_names.index(name), name, value)
        return table

    long = makers.episode(0, 30)
    with DatasetWriter(root / "long", schema()) as writer:
        writer.add(long, "öffne die Schublade")
    rewrite(change)(root / "long" / FIRST)
    info = root / "long" / "meta" / "info.json"
    counted = json.loads(info.read_text())
    info.write_text(json.dumps(counted | {"total_episodes": 0}))
    reader = DatasetReader(root / "long")
    (found,) = reader.episodes()
    assert np.array_equal(found.columns["next.reward"], long["next.reward"])
    assert found.columns["note"].tolist() == ["", *long["note"][1:].tolist()]
    assert np.isnan(found.columns["calibration"]).all() and found.columns["calibration"].shape == (30, 2, 3)
