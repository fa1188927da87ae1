"""Writing: episodes come back unchanged, files are split at the limits, episodes that do not fit are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.experience.lerobot_makers import (
    FPS,
    FRONT,
    TASKS,
    WRIST,
    assert_holds,
    episode,
    files,
    info,
    length,
    schema,
    task,
    write,
)
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.experience.lerobot import disk, layout
from vla_rl.experience.lerobot import writer as writing
from vla_rl.experience.lerobot.disk import DamagedError
from vla_rl.experience.lerobot.layout import Limits
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.experience.lerobot.writer import DatasetWriter, repair


def test_episodes_come_back_bit_for_bit(tmp_path):
    write(tmp_path / "set", 8)
    assert_holds(tmp_path / "set", list(range(8)))
    written = info(tmp_path / "set")
    frames = sum(map(length, range(8)))
    assert (written["total_episodes"], written["total_frames"], written["total_tasks"]) == (8, frames, 3)
    assert written["codebase_version"] == "v3.0" and written["splits"] == {"train": "0:8"} and written["fps"] == 50 / 3
    assert written["features"][FRONT]["info"]["video.codec"] == "av1" and written["features"][WRIST]["dtype"] == "image"
    assert files(tmp_path / "set", "*") == [
        "data/chunk-000/file-000.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        f"videos/{FRONT}/chunk-000/file-000.mp4",
    ]


def test_a_folder_with_a_colon_in_its_name_is_no_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("rec:1"), 2)
    assert len(list(DatasetReader(Path("rec:1")).episodes())) == 2


def test_files_and_folders_are_closed_at_their_limits(tmp_path):
    root = tmp_path / "set"
    write(root, 6, limits=Limits(data_mb=0.02, video_mb=0.0025, files_per_folder=2))
    assert_holds(root, list(range(6)))
    data, videos = files(root, "data/*/*.parquet"), files(root, "*.mp4")
    assert len(data) >= 3 and data[2] == "data/chunk-001/file-000.parquet"
    assert len(videos) >= 3 and videos[2] == f"videos/{FRONT}/chunk-001/file-000.mp4"
    assert sum(pq.ParquetFile(root / path).metadata.num_rows for path in data) == sum(map(length, range(6)))
    assert max((root / path).stat().st_size for path in videos) < 0.0025 * 2**20 + 2000, (
        "the last may pass by its index"
    )


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """Six episodes, written in three parts, and the first part's files, whose last split is "validation"."""
    root = tmp_path_factory.mktemp("grown") / "set"
    write(root, 3)
    kept = [name for name in files(root, "*") if "info" not in name and "stats" not in name]
    before = {name: (root / name).read_bytes() for name in kept}
    disk.write_json(root / "meta" / "info.json", info(root) | {"splits": {"train": "0:2", "validation": "2:3"}})
    write(root, 2, first=3)
    write(root, 1, first=5)
    return root, before


def test_a_dataset_grows_and_what_was_there_stays_untouched(grown):
    """The last of its splits grows with it."""
    root, before = grown
    assert_holds(root, list(range(6)))
    assert {name: (root / name).read_bytes() for name in before} == before, "tasks were all known"
    data = files(root, "data/*/*.parquet")
    assert len(data) == len(files(root, "meta/episodes/*/*.parquet")) == 3
    indices = np.concatenate([pq.read_table(root / name)["index"].to_numpy() for name in data])
    assert np.array_equal(indices, np.arange(sum(map(length, range(6)))))
    assert info(root)["splits"] == {"train": "0:2", "validation": "2:6"}


def test_statistics_of_all_do_not_depend_on_how_they_were_added(grown, tmp_path):
    write(tmp_path / "one", 6)
    one, two = (json.loads((root / "meta" / "stats.json").read_text()) for root in (tmp_path / "one", grown[0]))
    assert one.keys() == two.keys() and {*episode(0), "timestamp", "index", "task_index"} - {"note"} <= one.keys()
    one.pop("complementary_info.seed")  # beyond the whole numbers that float64 holds
    for name, item in one.items():
        for key, value in item.items():
            np.testing.assert_allclose(value, two[name][key], rtol=1e-9, atol=1e-12, err_msg=f"{name} {key}")
    state = np.concatenate([episode(i)["observation.state"] for i in range(6)]).astype(float)
    np.testing.assert_allclose(one["observation.state"]["mean"], state.mean(0), atol=1e-12)
    np.testing.assert_allclose(one["observation.state"]["std"], state.std(0), atol=1e-12)


def test_every_episode_has_its_seconds_of_its_video(grown):
    """lerobot cuts a file of several episodes by these times."""
    key, wanted = f"videos/{FRONT}/", []
    for group in (range(3), range(3, 5), range(5, 6)):
        ends = np.cumsum([length(index) for index in group]) / FPS
        wanted += zip([0.0, *ends[:-1]], ends, strict=True)
    tables = [pq.read_table(grown[0] / name) for name in files(grown[0], "meta/episodes/*/*.parquet")]
    for which, column in zip(("from", "to"), np.array(wanted).T, strict=True):
        found = np.concatenate([table[f"{key}{which}_timestamp"].to_numpy() for table in tables])
        np.testing.assert_allclose(found, column, rtol=1e-12)


def test_tasks_may_change_within_an_episode(tmp_path):
    with DatasetWriter(tmp_path / "set", schema(), tasks=("unused", *TASKS)) as writer:
        assert writer.add(episode(0, 3), [TASKS[2], TASKS[0], TASKS[2]]) == 0
        assert writer.add(episode(1, 2), "a new one") == 1
    reader = DatasetReader(tmp_path / "set")
    assert reader.tasks == ("unused", *TASKS, "a new one")
    assert reader.read(0).task.tolist() == [3, 1, 3] and reader.read(1).task.tolist() == [4, 4]
    write(tmp_path / "set", 1)
    assert DatasetReader(tmp_path / "set").read(2).task.tolist() == [1] * length(0)


def test_recorded_episodes_are_read_before_they_are_finished(tmp_path):
    root = tmp_path / "set"
    write(root, 2)
    writer = DatasetWriter(root, schema())
    for index in (2, 3):
        assert writer.add(episode(index), task(index)) == index
        assert_holds(root, list(range(index + 1)))
    assert info(root)["total_episodes"] == 2
    writer.close()
    assert repair(root) == []
    assert_holds(root, [0, 1, 2, 3])
    assert info(root)["total_episodes"] == 4 and not (root / "recording").exists()
    with pytest.raises(UserError, match="nothing to repair"):
        repair(root)


def test_nothing_is_visible_before_it_is_synced(tmp_path, monkeypatch):
    """Every file of an episode is synced, then its folder, then comes the name, then the folder of names is synced."""
    events, sync, replace_ = [], os.fsync, os.replace

    def fsync(handle):
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def rename(source, target):
        events.append(("name", str(target)))
        replace_(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    root = tmp_path / "set"
    writer = DatasetWriter(root, schema())
    writer.add(episode(0), task(0))
    named = events.index(("name", str(root / "recording" / "episode-000000")))
    writing = root / "recording" / "episode-000000.writing"
    for name in (f"{FRONT}.mp4", "frames.parquet", "episode.json.writing", ""):
        assert ("sync", str(writing / name).rstrip("/")) in events[:named], name
    assert events[named + 1] == ("sync", str(root / "recording"))
    events.clear()
    writer.finalise()
    names = [Path(target).relative_to(root).as_posix() for kind, target in events if kind == "name"]
    assert names[0] == "recording/committing.json" and names[-2:] == ["meta/info.json", "meta/stats.json"]
    ready = root / "recording" / "compacting"
    moved = names[1:-2]
    assert sorted(moved) == sorted(name for name in files(root, "*") if not name.endswith(".json"))
    first = events.index(("name", str(root / moved[0])))
    assert all(("sync", str(ready / name)) in events[:first] for name in moved)
    assert all(("sync", str((root / name).parent)) in events[first:] for name in moved)


def test_two_writers_exclude_each_other_but_a_dead_one_does_not(tmp_path):
    root = tmp_path / "set"
    first = DatasetWriter(root, schema())
    first.add(episode(0), task(0))
    with pytest.raises(UserError, match="is writing to"):
        DatasetWriter(root, schema()).add(episode(1), task(1))
    with pytest.raises(UserError, match="is writing to"):
        repair(root)
    first.close()
    write(root, 1, first=1)
    assert_holds(root, [0, 1])


def test_an_episode_that_the_disk_changed_is_put_aside(tmp_path):
    root = tmp_path / "set"
    writer = DatasetWriter(root, schema())
    for index in range(4):
        writer.add(episode(index), task(index))
    for number, name in ((1, "frames.parquet"), (2, f"{FRONT}.mp4")):
        path = root / "recording" / f"episode-{number:06d}" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    with pytest.raises(
        DamagedError, match=r"episode-000001/frames.parquet' is not what was recorded.*episode 1 cannot"
    ):
        writer.finalise()
    assert_holds(root, [0, 3])
    assert files(root / "recording" / "damaged", "*.mp4") == [f"episode-00000{i}/{FRONT}.mp4" for i in (1, 2)]
    write(root, 1, first=4)
    assert_holds(root, [0, 3, 4])


def test_a_full_disk_costs_only_the_episode_in_hand(tmp_path, monkeypatch):
    root = tmp_path / "set"
    writer = DatasetWriter(root, schema())
    writer.add(episode(0), task(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match=r"could not be written to .*No space left.*those before it are"):
            writer.add(episode(1), task(1))
        with pytest.raises(UserError, match=r"could not be made into v3.0 files.*No space left"):
            writer.finalise()
    assert_holds(root, [0])
    writer.add(episode(1), task(1))
    writer.finalise()
    assert_holds(root, [0, 1])


def test_a_stray_file_is_not_overwritten(tmp_path):
    root = tmp_path / "set"
    write(root, 1)
    shutil.copytree(root / "data" / "chunk-000", root / "data" / "chunk-001")
    (root / "data" / "chunk-001" / "file-000.parquet").rename(root / "data" / "chunk-000" / "file-001.parquet")
    stray = (root / "data" / "chunk-000" / "file-001.parquet").read_bytes()
    with pytest.raises(UserError, match=r"file-001.parquet' exists although meta/info.json does not mention it"):
        write(root, 1, first=1)
    assert (root / "data" / "chunk-000" / "file-001.parquet").read_bytes() == stray
    (root / "data" / "chunk-000" / "file-001.parquet").unlink()
    assert repair(root) == []
    assert_holds(root, [0, 1])


def test_an_older_info_file_undoes_nothing(tmp_path, monkeypatch):
    """Killed while the recorded folders of a finished dataset go away, and then ``info.json`` is an older one."""
    root = tmp_path / "set"
    write(root, 1)
    older = (root / "meta" / "info.json").read_bytes()
    monkeypatch.setattr(
        writing, "_complete", lambda root, commit: shutil.rmtree(root / "recording" / commit["folders"][0]) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        write(root, 2, first=1)
    monkeypatch.undo()
    data = files(root, "data/*/*.parquet")
    (root / "meta" / "info.json").write_bytes(older)
    with pytest.raises(UserError, match="is not the one that was last written and nothing was touched"):
        repair(root)
    assert files(root, "data/*/*.parquet") == data and layout.read_committing(root / "recording")


def test_what_lerobot_added_after_a_kill_is_not_undone(tmp_path, monkeypatch):
    """Killed right after ``info.json``; then somebody else's writer adds an episode and its statistics."""
    root = tmp_path / "set"
    monkeypatch.setattr(writing, "_complete", lambda root, commit: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(root, 2)
    monkeypatch.undo()
    write(tmp_path / "other", 3)
    for name in files(tmp_path / "other", "*"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "other" / name, root / name)
    stats = (root / "meta" / "stats.json").read_bytes()
    assert_holds(root, [0, 1, 2])
    assert repair(root) == [] and (root / "meta" / "stats.json").read_bytes() == stats
    assert_holds(root, [0, 1, 2])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"action": None}, "has the columns"),
        ({"action": np.zeros((3, 4), np.float32)}, r"'action' of an episode is float32\[3, 4\] but float32\[3, 3\]"),
        ({"action": np.full((3, 3), np.nan, np.float32)}, "column 'action' of an episode is not finite in frame 0"),
        ({"action": np.zeros((2, 3), np.float32)}, "give all the same"),
        ({FRONT: np.zeros((3, 32, 48, 3), np.float32)}, "but uint8"),
        ({"note": np.zeros(3)}, "but string"),
        ({"texts": TASKS[:2]}, "3 frames comes with 2 task texts"),
    ],
)
def test_an_episode_that_does_not_fit_is_refused(tmp_path, change, sentence):
    columns = {**episode(0, 3), **change}
    texts = columns.pop("texts", TASKS[0])
    with pytest.raises((ContractError, NonFiniteError), match=sentence):
        DatasetWriter(tmp_path / "set", schema()).add({k: v for k, v in columns.items() if v is not None}, texts)
    assert not (tmp_path / "set").exists()


def test_a_folder_that_is_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    with pytest.raises(UserError, match="exists and is no dataset"):
        DatasetWriter(tmp_path / "thesis", schema())
    write(tmp_path / "set", 1)
    with pytest.raises(ContractError, match=r"has 16\.6667 frames per second and not 10"):
        DatasetWriter(tmp_path / "set", schema(fps=10))
    (tmp_path / "set" / "meta" / "tasks.parquet").unlink()
    with pytest.raises(DamagedError, match=r"'meta/tasks.parquet' is missing"):
        DatasetWriter(tmp_path / "set", schema())
    with pytest.raises(ContractError, match="give a positive number"):
        schema(fps=0)
