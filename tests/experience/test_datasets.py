"""Demonstrations as datasets: they come back, a dataset has one writer, what cannot be learnt from is named."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest

from sims.catalog import make
from tests.experience.makers import recorded
from tests.experience.test_demonstrations import count
from tests.experience.test_lerobot_video import picture
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.collect import collect_demonstrations, iter_demonstrations
from vla_rl.experience.datasets import (
    Recording,
    depth_cameras,
    load_demonstrations,
    move_aside,
    repair,
    save_demonstrations,
    schema_of,
    stream_demonstrations,
)
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.experience.lerobot.features import IMAGE, Feature
from vla_rl.experience.lerobot.writer import DatasetWriter
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.recipes.robots.drive import Recorder
from vla_rl.training.tracking import RunFolder


def same(one: Demonstrations, other: Demonstrations) -> bool:
    arrays = [{**vars(item), **item.images, **item.extras, "images": 0, "extras": 0} for item in (one, other)]
    return arrays[0].keys() == arrays[1].keys() and all(
        np.array_equal(value, arrays[1][name]) and np.asarray(value).dtype == np.asarray(arrays[1][name]).dtype
        for name, value in arrays[0].items()
    )


def episode(length: int = 4, channels: int = 3) -> Demonstrations:
    """Actions 1, 2, ... ``length``."""
    return recorded(
        np.arange(1, length + 1, dtype=np.float32)[:, None],
        images={"cam": np.zeros((length, 32, 32, channels), np.uint8)},
        state=np.zeros((length, 2), np.float32),
        state_names=("a", "b"),
        action_names=("x",),
    )


def saved(root: Path, count: int) -> Path:
    """``count`` episodes, of which the state says the number."""
    with Recording(root, "never") as kept:
        for i in range(count):
            kept.add(replace(episode(), state=np.full((4, 2), i, np.float32)))
    return root


def test_a_dataset_that_is_being_recorded_is_not_taken_away(tmp_path: Path) -> None:
    with Recording(tmp_path / "d", "never") as first:
        first.add(episode())
        with pytest.raises(UserError, match="is writing to"):
            move_aside(tmp_path / "d")
        with pytest.raises(UserError, match="is writing to"), Recording(tmp_path / "d", "never") as second:
            second.add(episode())
        with pytest.raises(UserError, match="is writing to"), DatasetWriter(tmp_path / "d", schema_of(episode())):
            pass  # at its end it would finish what is there
        first.add(episode())
    assert load_demonstrations(tmp_path / "d").count == 2


def test_a_recorder_has_its_folder_from_the_start(tmp_path: Path) -> None:
    with Recording(tmp_path / "d"), pytest.raises(UserError, match="is writing to"), Recorder(tmp_path / "d"):
        pass
    assert not (tmp_path / "d").exists()
    with Recording(saved(tmp_path / "d", 1)):
        assert (tmp_path / "d/recording").exists()
    assert load_demonstrations(tmp_path / "d").count == 1 and not (tmp_path / "d/recording").exists()


def test_a_recorder_whose_folder_went_finishes_no_others(tmp_path: Path) -> None:
    here, gone = tmp_path / "d", tmp_path / "d.1"
    with ExitStack() as opened:
        with pytest.raises(UserError, match="was moved or removed"), Recording(here, "never") as first:
            first.add(episode())
            here.rename(gone)
            second = opened.enter_context(Recording(here, "never"))
            second.add(episode())
        second.add(episode())
    repair(gone)
    assert (load_demonstrations(here).count, load_demonstrations(gone).count) == (2, 1)


def test_episodes_whose_numbers_have_a_gap_are_read(tmp_path: Path) -> None:
    root = saved(tmp_path / "d", 4)
    for part in ("data", "meta/episodes"):
        file = root / part / "chunk-000/file-000.parquet"
        table = pq.read_table(file)
        pq.write_table(table.filter(pa.compute.not_equal(table["episode_index"], 1)), file)
    info = root / "meta/info.json"
    info.write_text(info.read_text().replace('"total_episodes": 4', '"total_episodes": 3'))
    found = load_demonstrations(root)
    assert found.count == 3 and found.state[:, 0].tolist() == [0] * 4 + [2] * 4 + [3] * 4
    with pytest.raises(UserError, match="numbers up to 3 but are 3"), Recording(root, "never") as more:
        more.add(episode())


@pytest.mark.parametrize(
    ("column", "values", "sentence"),
    [
        ("timestamp", [0.0, 0.1, 0.2, 0.3] * 2 + [0.0, 0.2, 0.4, 0.6], r"has a frame every 0\.2 s.* episode 2 "),
        ("action", [*range(10), float("nan"), 0], r"is not finite in frame 2.* episode 2 "),
    ],
)
def test_an_episode_of_wrong_numbers_is_named(tmp_path: Path, column: str, values: list[float], sentence: str) -> None:
    file = saved(tmp_path / "d", 3) / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    new = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, new), file)
    with pytest.raises(UserError, match=f"'{column}', {sentence}"):
        load_demonstrations(tmp_path / "d")
    assert load_demonstrations(tmp_path / "d", on_damage=lambda problem: None).count == 2


def test_depth_is_read_as_it_is_where_it_is_named(tmp_path: Path) -> None:
    root, depth = saved(tmp_path / "d", 1), np.arange(4 * 8 * 6, dtype=np.uint16).reshape(4, 8, 6)[:, :, :, None] * 300
    file, info = root / "data/chunk-000/file-000.parquet", root / "meta/info.json"
    pictures = [{"bytes": picture("png", "gray16be", item[..., 0].astype(">u2")), "path": ""} for item in depth]
    pq.write_table(pq.read_table(file).append_column("observation.images.far", pa.array(pictures, IMAGE)), file)
    known = json.loads(info.read_text())
    known["features"]["observation.images.far"] = Feature("image", (8, 6, 1), None, {"is_depth_map": True}).to_json()
    info.write_text(json.dumps(known))
    assert load_demonstrations(root).images.keys() == {"cam"} and depth_cameras(root) == ["far"]
    found = load_demonstrations(root, cameras=["far"])
    assert found.images.keys() == {"far"} and found.images["far"].dtype == np.uint16
    assert np.array_equal(found.images["far"], depth)
    recipe = ImitateDataset(str(root), cameras=("cam", "far"))
    with pytest.raises(UserError, match=r"camera 'far' of .* shows depth and policies read RGB.* leave it out"):
        recipe.run(RunFolder(tmp_path / "run", recipe))


# -- saved at once -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def episodes() -> Demonstrations:
    """Four episodes of the counting environment."""
    return collect_demonstrations(make("counting", num_envs=3), count, list(range(100, 108)))


def test_saved_episodes_come_back(episodes, tmp_path):
    path = tmp_path / "deep" / "demos"
    save_demonstrations(episodes, path)
    assert [item.name for item in path.parent.iterdir()] == ["demos"]
    assert same(load_demonstrations(path), episodes)
    parts = list(stream_demonstrations(path))
    assert [set(part.episode) for part in parts] == [{0}, {1}, {2}, {3}]
    assert same(load_demonstrations(path, [2, 0]), Demonstrations.joined([parts[2], parts[0]]))


def test_an_earlier_dataset_is_moved_aside_and_nothing_else(episodes, tmp_path):
    for _ in range(3):
        save_demonstrations(episodes, tmp_path / "demos")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["demos", "demos.1", "demos.2"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    with pytest.raises(UserError, match="is no dataset, so it was left alone"):
        save_demonstrations(episodes, tmp_path / "thesis")
    assert [item.name for item in (tmp_path / "thesis").iterdir()] == ["chapter"]
    assert not list(tmp_path.glob("*.writing"))


def test_a_write_that_fails_changes_nothing(episodes, tmp_path, monkeypatch):
    path = tmp_path / "demos"
    save_demonstrations(episodes, path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(UserError, match="no space left"):
        save_demonstrations(episodes, path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_recording_that_stops_keeps_what_was_added(tmp_path):
    parts = list(iter_demonstrations(make("counting", num_envs=3), count, [100, 102, 104]))
    with pytest.raises(ZeroDivisionError), Recording(tmp_path / "demos") as kept:
        kept.add(parts[0])
        kept.add(parts[1])
        raise ZeroDivisionError
    assert same(load_demonstrations(tmp_path / "demos"), Demonstrations.joined(parts[:2]))
    with Recording(tmp_path / "demos") as kept:
        kept.add(parts[2])
    assert same(load_demonstrations(tmp_path / "demos"), Demonstrations.joined(parts[:3]))
    assert not (tmp_path / "demos" / "recording").exists()


def test_an_episode_that_a_dataset_cannot_hold_is_refused(episodes, tmp_path):
    with pytest.raises(ContractError, match="does not count 0, 1, 2"):
        save_demonstrations(replace(episodes, time=episodes.time + 1), tmp_path / "demos")
    with pytest.raises(ContractError, match="two tasks have the same text"):
        save_demonstrations(replace(episodes, tasks=("count", "count")), tmp_path / "demos")
    assert not list(tmp_path.iterdir())
