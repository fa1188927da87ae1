"""Lance tables that lerobot-lancedb wrote (tests/golden/lerobot/tables.py): the numbers of what they are made of."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.hub import Hub, alone, at, serving
from tests.patience import PATIENCE
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations, stream_demonstrations
from vla_rl.experience.lerobot.disk import DamagedError
from vla_rl.experience.lerobot.lance import LanceTables
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.experience.lerobot.writer import DatasetWriter
from vla_rl.recipes.push import Card, dataset_upload

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
TABLES, FILES = GOLDEN / "lance", GOLDEN / "dataset"
FRONT = "observation.images.front"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TABLES, tmp_path / "tables"))


def same(root: Path, episodes: list[int]) -> None:
    """Whether ``episodes`` of the dataset ``root``, in this order, are those of the files."""
    reader, files = DatasetReader(root), DatasetReader(FILES)
    for episode in episodes:
        read, expected = reader.read(episode), files.read(episode)
        assert read.columns.keys() == expected.columns.keys() and read.tasks == expected.tasks
        for name, column in expected.columns.items():
            np.testing.assert_array_equal(read.columns[name], column, name)
        np.testing.assert_array_equal(read.task, expected.task)
        np.testing.assert_array_equal(read.time, expected.time)


def test_every_number_text_and_picture_is_that_of_the_files() -> None:
    """In any order: the copies of videos change."""
    same(TABLES, [0, 1, 2, 3, 4, 2, 0])
    assert DatasetReader(TABLES).stats.keys() == DatasetReader(FILES).stats.keys()


def test_tables_on_the_hub_are_read_by_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a first download did not bring of a table, a second one does."""
    files = {str(path.relative_to(TABLES)): path.read_bytes() for path in TABLES.rglob("*") if path.is_file()}
    with serving(Hub({"datasets/somebody/tables": {"v3.0": files}})) as server:
        at(monkeypatch, server.url)
        alone(monkeypatch, tmp_path)
        monkeypatch.chdir(tmp_path)
        found = load_demonstrations("somebody/tables", [1])
        np.testing.assert_array_equal(found.action, load_demonstrations(FILES, [1]).action)
        np.testing.assert_array_equal(found.images["front"], load_demonstrations(FILES, [1]).images["front"])
        assert not list(tmp_path.rglob("meta.lance"))
        [data] = tmp_path.rglob("frames.lance/data/*.lance")
        data.unlink()
        np.testing.assert_array_equal(
            load_demonstrations("somebody/tables", [2]).action, load_demonstrations(FILES, [2]).action
        )


def cut(root: Path) -> None:
    [path] = (root / "frames.lance/data").iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def huge(root: Path) -> None:
    """Sizes that no memory holds, at whichever place they are allocated."""
    for path in (root / "frames.lance/data").iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : -40] = b"\xff" * (len(content) - 40 - len(content) // 2)
        path.write_bytes(content)


def changing(change: str) -> Callable[[Path], None]:
    """What lance does to a dataset ``root``, in a process of its own: it does not stand the forks of other tests."""

    def damage(root: Path) -> None:
        subprocess.run([sys.executable, "-c", BEGIN + change, str(root)], check=True)

    return damage


BEGIN = """
import shutil, sys
from pathlib import Path
import lance
import pyarrow as pa
root = Path(sys.argv[1])
"""
FRAMES = "lance.dataset(root / 'frames.lance')"
SHORTER = f"{FRAMES}.delete('frame_index = 1 AND episode_index = 0')"
NO_ACTION = f"{FRAMES}.drop_columns(['action'])"
ELSEWHERE = f"""
address = {(FILES / f"videos/{FRONT}/chunk-000/file-000.mp4").as_uri()!r}
places = {{"video_key": [{FRONT!r}], "chunk_index": [0], "file_index": [0]}}
columns = [("video_key", pa.string()), ("chunk_index", pa.int64()), ("file_index", pa.int64())]
schema = pa.schema([*columns, lance.blob_field("video_bytes")])
table = pa.table({{**places, "video_bytes": lance.blob_array([address])}}, schema=schema)
shutil.rmtree(root / "videos.lance")
given = {{"data_storage_version": "2.2", "allow_external_blob_outside_bases": True}}
lance.write_dataset(table, root / "videos.lance", **given)
"""
TEXT = f"table = {FRAMES}\ntable.drop_columns(['action'])\ntable.add_columns({{'action': \"'text'\"}})"
NO_VIDEO = "lance.dataset(root / 'videos.lance').delete('file_index = 0 AND chunk_index = 0')"
OTHER_BASE = f"{FRAMES}.add_bases([lance.DatasetBasePath(str(root.parent / 'other'), name='other')])"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"'frames.lance' cannot be read \("),
        (huge, r"'frames.lance' cannot be read \("),
        (lambda root: shutil.rmtree(root / "frames.lance"), "'frames.lance' is missing"),
        (
            changing(f"{FRAMES}.delete('frame_index = 1 AND episode_index = 0')"),
            "'frames.lance' holds 5 frames of episode 0 where meta/ says 6",
        ),
        (changing(NO_ACTION), "'frames.lance', column 'action', is missing"),
        (changing(TEXT), "'frames.lance', column 'action', is string where float32"),
        (changing(NO_VIDEO), "has no file 0 in chunk 0"),
        (changing(OTHER_BASE), "'frames.lance' has files in other places, which are not read"),
        (changing(ELSEWHERE), "names a video in another place, 'file:///"),
    ],
    ids=["cut", "huge", "missing", "shorter", "no column", "a type", "no video", "files elsewhere", "video elsewhere"],
)
def test_damage_is_named_and_costs_what_it_must(copy: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(copy)
    with pytest.raises(DamagedError, match=said) as found:
        DatasetReader(copy).read(0)
    assert ".rs:" not in str(found.value)
    problems: list[object] = []
    assert len(list(stream_demonstrations(copy, on_damage=problems.append))) + len(problems) == len(DatasetReader(copy))


@pytest.fixture
def opened() -> tuple[DatasetReader, LanceTables]:
    """A reader that has read, and its tables."""
    reader = DatasetReader(TABLES)
    tables = reader._files
    assert isinstance(tables, LanceTables)
    reader.read(0)
    return reader, tables


def action(reader: DatasetReader, episode: int) -> bool:
    expected = DatasetReader(FILES).read(episode).columns["action"]
    return np.array_equal(reader.read(episode).columns["action"], expected)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL])
def test_a_process_that_ends_is_damage_or_not_and_another_reads_on(opened, monkeypatch, number) -> None:
    """A damaged size ends it by SIGABRT: no memory is enough.  What somebody else ends says nothing of the tables."""
    reader, tables = opened
    send = tables._child.send

    def killed(*message: object) -> None:
        os.kill(tables._child.pid, number)
        send(*message)

    monkeypatch.setattr(tables._child, "send", killed)
    with pytest.raises(UserError, match=f"was killed by {number.name}") as found:
        reader.read(1)
    assert isinstance(found.value, DamagedError) == (number == signal.SIGABRT)
    assert action(reader, 1)


def test_what_comes_between_a_question_and_its_answer_leaves_no_answer_for_the_next(opened, monkeypatch) -> None:
    reader, tables = opened

    def interrupted(*message: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tables._child, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.read(1)
    assert all(action(reader, episode) for episode in (3, 0, 4))


def test_threads_and_forked_processes_read_what_they_ask_for(opened) -> None:
    reader, tables = opened
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda episode: action(reader, episode), [0, 1, 2, 3, 4] * 4))
    here = tables._child.pid
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=lambda: os._exit(0 if action(reader, 3) else 1)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    assert tables._child.pid == here and action(reader, 2)


def test_an_answer_of_another_episode_is_not_taken(opened, monkeypatch) -> None:
    reader, tables = opened
    send = tables._child.send
    monkeypatch.setattr(
        tables._child, "send", lambda message, *rest: send({**message, "episode": 0, "length": 6}, *rest)
    )
    with pytest.raises(DamagedError, match="holds frames of another episode"):
        reader.read(4)


def test_the_process_ends_with_its_reader() -> None:
    reader = DatasetReader(TABLES)
    reader.read(0)
    child = reader._files._child  # type: ignore[union-attr]  # of a reader of tables
    assert child.running
    del reader
    assert child.closed


def test_tables_are_pushed_whole(copy: Path) -> None:
    upload = dataset_upload(copy, Card("somebody/tables"))
    here = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert here <= upload.files.keys() and "frames.lance/*" in upload.replaces


def test_tables_are_not_written(copy: Path) -> None:
    schema, before = DatasetReader(copy).schema, sorted(copy.rglob("*"))
    with pytest.raises(UserError, match=r"v3\.0 in Lance tables, which is read but not written"):
        DatasetWriter(copy, schema, ("a task",))
    assert sorted(copy.rglob("*")) == before


def test_another_storage_is_refused_by_its_name(copy: Path) -> None:
    info = json.loads((copy / "meta/info.json").read_text())
    (copy / "meta/info.json").write_text(json.dumps({**info, "storage_format": "zarr"}))
    with pytest.raises(UserError, match="is stored as 'zarr', which is not read"):
        DatasetReader(copy)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    reader = DatasetReader(TABLES)  # whose meta/ needs none
    with pytest.raises(UserError, match=r"pylance is not installed, so .* is not read; pip install 'vla-rl\[lance\]'"):
        reader.read(0)
