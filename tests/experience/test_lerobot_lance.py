"""Lance tables that lerobot-lancedb wrote (tests/golden/lerobot/tables.py): the numbers of what they are made of."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.hub import Hub, alone, at, serving
from vla_rl.contract.errors import UserError
from vla_rl.experience.datasets import load_demonstrations, stream_demonstrations
from vla_rl.experience.lerobot.disk import DamagedError
from vla_rl.experience.lerobot.lance import LanceTables
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.experience.lerobot.writer import DatasetWriter

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


def shorter(root: Path) -> None:
    import lance

    lance.dataset(root / "frames.lance").delete("frame_index = 1 AND episode_index = 0")


def without_action(root: Path) -> None:
    import lance

    lance.dataset(root / "frames.lance").drop_columns(["action"])


def of_text(root: Path) -> None:
    import lance

    table = lance.dataset(root / "frames.lance")
    table.drop_columns(["action"])
    table.add_columns({"action": "'text'"})


def without_video(root: Path) -> None:
    import lance

    lance.dataset(root / "videos.lance").delete("file_index = 0 AND chunk_index = 0")


def files_elsewhere(root: Path) -> None:
    import lance

    lance.dataset(root / "frames.lance").add_bases([lance.DatasetBasePath(str(root.parent / "other"), name="other")])


def elsewhere(root: Path) -> None:
    """A video that lies outside, named by its address."""
    import lance

    address = (FILES / f"videos/{FRONT}/chunk-000/file-000.mp4").as_uri()
    table = pa.table(
        {"video_key": [FRONT], "chunk_index": [0], "file_index": [0], "video_bytes": lance.blob_array([address])},
        schema=pa.schema(
            [
                ("video_key", pa.string()),
                ("chunk_index", pa.int64()),
                ("file_index", pa.int64()),
                lance.blob_field("video_bytes"),
            ]
        ),
    )
    shutil.rmtree(root / "videos.lance")
    lance.write_dataset(
        table, root / "videos.lance", data_storage_version="2.2", allow_external_blob_outside_bases=True
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"'frames.lance' cannot be read \("),
        (huge, r"'frames.lance' cannot be read \("),
        (lambda root: shutil.rmtree(root / "frames.lance"), "'frames.lance' is missing"),
        (shorter, "'frames.lance' holds 5 frames of episode 0 where meta/ says 6"),
        (without_action, "'frames.lance', column 'action', is missing"),
        (of_text, "'frames.lance', column 'action', is string where float32"),
        (without_video, "has no file 0 in chunk 0"),
        (files_elsewhere, "'frames.lance' has files in other places, which are not read"),
        (elsewhere, "names a video in another place, 'file:///"),
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


def test_tables_that_end_the_process_that_reads_them_are_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a damaged size does, for which no memory is enough; another process reads on."""
    tables = LanceTables(TABLES)
    reader = DatasetReader(TABLES)
    reader._files = tables
    reader.read(0)
    assert tables._reading is not None
    ask = tables._reading.ask

    def killed(request: dict[str, object]) -> bytes:
        tables._reading._process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]  # it was read from
        return ask(request)

    monkeypatch.setattr(tables._reading, "ask", killed)
    with pytest.raises(DamagedError, match="it ended the process that tried"):
        reader.read(1)
    assert reader.read(1).index == 1


def test_the_process_ends_with_its_reader() -> None:
    tables = LanceTables(TABLES)
    DatasetReader(TABLES)
    reader = DatasetReader(TABLES)
    reader._files = tables
    reader.read(0)
    assert tables._reading is not None
    process, copies = tables._reading._process, Path(tables._reading._process.args[-2])  # type: ignore[index]
    assert copies.is_dir()
    del tables, reader
    assert process.returncode is not None and not copies.exists()


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
    with pytest.raises(UserError, match=r"pylance is not installed, so .* is not read; pip install 'vla-rl\[lance\]'"):
        DatasetReader(TABLES)
