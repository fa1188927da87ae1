"""A folder that lerobot 0.4.4 itself wrote (tests/golden/lerobot/write.py) is read: every number, text and picture.

So is depth as lerobot 0.6.1 wrote it (``depth.py``), to the millimetre that its loader gives.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.lerobot import video
from vla_rl.experience.lerobot.features import (
    NAMES,
    QUANTILES,
    Feature,
    Schema,
    combined,
    episode_statistics,
    sampled_frames,
    stats_from_json,
    stats_to_json,
)
from vla_rl.experience.lerobot.reader import DatasetReader
from vla_rl.experience.lerobot.writer import DatasetWriter

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
DATASET = GOLDEN / "dataset"
FRONT, WRIST = "observation.images.front", "observation.images.wrist"


# lerobot 0.4.4 squares pictures as uint8, which wraps around, and takes the difference of squares of 2^40.
WRONG_DEVIATIONS = {FRONT, WRIST, "ticks"}


def formulas():
    spec = importlib.util.spec_from_file_location("golden_values", GOLDEN / "values.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VALUES = formulas()


def columns(episode: int) -> dict[str, np.ndarray]:
    """What was put into an episode, from the formulas."""
    frames = range(VALUES.LENGTHS[episode])
    numbers = [VALUES.numbers(episode, frame) for frame in frames]
    stacked = {name: np.stack([item[name] for item in numbers]) for name in numbers[0]}
    stacked = {name: item[:, 0] if item.shape[1:] == (1,) else item for name, item in stacked.items()}
    return stacked | {
        FRONT: np.stack([VALUES.picture(VALUES.FRONT, episode, frame) for frame in frames]),
        WRIST: np.stack([VALUES.picture(VALUES.WRIST, episode, frame) for frame in frames]),
        "note": np.array([VALUES.note(episode, frame) for frame in frames]),
    }


def test_every_episode_is_read_from_its_files():
    reader = DatasetReader(DATASET)
    assert len(reader) == 5 and reader.schema.fps == 10
    assert set(reader.tasks) == set(VALUES.TASKS) and reader.schema.robot == "toy"
    assert len(list(DATASET.rglob("data/*/*.parquet"))) == 3 and len(list(DATASET.rglob("*.mp4"))) == 4
    for found in reader.episodes():
        wanted = columns(found.index)
        assert found.columns.keys() == wanted.keys()
        for name, values in wanted.items():
            read = found.columns[name]
            assert read.shape == values.shape and read.dtype.kind == values.dtype.kind
            if name == FRONT:
                off = np.abs(read.astype(int) - values)
                assert off.mean() < 1.5 and off.max() <= 12
            else:
                assert np.array_equal(read, values), name
        assert {found.tasks[i] for i in found.task} == {VALUES.TASKS[found.index]}
        assert np.array_equal(found.time, np.arange(VALUES.LENGTHS[found.index]))
    assert reader.problems == ()


def test_the_golden_dataset_is_loaded_as_demonstrations():
    episodes = load_demonstrations(DATASET, episodes=[4, 1])
    assert episodes.count == 2 and episodes.state_names == tuple(VALUES.STATE_NAMES) and episodes.fps == 10
    assert np.array_equal(episodes.state, np.concatenate([columns(i)["observation.state"] for i in (4, 1)]))
    assert episodes.images["wrist"].shape == (7, *VALUES.WRIST) and episodes.images["front"].dtype == np.uint8
    assert [episodes.tasks[i] for i in episodes.task] == [VALUES.TASKS[4]] * 4 + [VALUES.TASKS[1]] * 3
    assert set(episodes.seed) == {-1} and episodes.extras["ticks"][0] == 2**40 + 4000
    chunks, shown = episodes.chunks(2)
    assert np.array_equal(chunks[3], episodes.action[[3, 3]]) and shown[3].tolist() == [True, False]


def test_our_statistics_are_lerobots():
    """Its means are float32, its quantiles come from 5000 bins; everything else is equal."""
    table = pq.read_table(next(DATASET.rglob("meta/episodes/*/*.parquet"))).to_pylist()
    declared = DatasetReader(DATASET).schema.features
    for episode, row in enumerate(table):
        ours = episode_statistics(columns(episode), declared)
        assert {name.split("/")[1] for name in row if name.startswith("stats/")} - ours.keys() == {
            "timestamp",
            "frame_index",
            "episode_index",
            "index",
            "task_index",
        }
        for name, item in ours.items():
            theirs = {key: np.asarray(row[f"stats/{name}/{key}"]) for key in NAMES}
            span = float(np.max(theirs["max"].astype(float) - theirs["min"].astype(float))) + 1e-9
            most = np.abs(theirs["max"].astype(float)).max()
            bounds = {"min": 0.0, "max": 0.0, "count": 0.0, "std": 2e-3 * span} | {"mean": 1e-6 * most}
            for key, value in item.items():
                assert value.shape == theirs[key].shape, (name, key)
                if key == "std" and name in WRONG_DEVIATIONS:
                    continue
                bound = bounds.get(key, span / 5000 + 1e-6 * most) + 1e-9
                np.testing.assert_allclose(value.astype(float), theirs[key].astype(float), atol=bound, rtol=0)


def test_statistics_of_all_are_lerobots():
    parts = pq.read_table(next(DATASET.rglob("meta/episodes/*/*.parquet"))).to_pylist()
    names = ("observation.state", "action", "next.reward", FRONT, WRIST)
    split = [{name: {key: np.asarray(row[f"stats/{name}/{key}"]) for key in NAMES} for name in names} for row in parts]
    whole, theirs = combined(split), json.loads((DATASET / "meta" / "stats.json").read_text())
    for name in names:
        for key in NAMES:
            np.testing.assert_allclose(
                whole[name][key], theirs[name][key], rtol=1e-6, atol=1e-9, err_msg=f"{name} {key}"
            )


def test_our_types_are_lerobots(tmp_path):
    """Same parquet schema, same columns in meta/episodes, same entries in info.json for the same data."""
    golden = DatasetReader(DATASET)
    declared = {
        FRONT: video.camera(VALUES.FRONT, 10, "always"),
        WRIST: video.camera(VALUES.WRIST, 10, "never"),
        "observation.state": Feature("float32", (3,), VALUES.STATE_NAMES),
        "action": Feature("float32", (2,), VALUES.ACTION_NAMES),
        **{name: golden.schema.features[name] for name in ("next.reward", "next.done", "calibration", "ticks", "note")},
    }
    with DatasetWriter(tmp_path / "ours", Schema(10, declared, "toy")) as writer:
        for episode, text in enumerate(VALUES.TASKS):
            writer.add(columns(episode), text)
    ours, theirs = tmp_path / "ours", DATASET
    for name in ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"):
        one, other = pq.read_schema(ours / name), pq.read_schema(theirs / name)
        assert {item.name: item.type for item in one} == {item.name: item.type for item in other}
        assert [(item.name, item.metadata) for item in one] == [
            (item.name, item.metadata) for item in other
        ] or "meta" in name
    infos = [json.loads((root / "meta" / "info.json").read_text()) for root in (ours, theirs)]
    assert infos[0].keys() == infos[1].keys() and infos[0]["splits"] == infos[1]["splits"]
    for name, feature in infos[1]["features"].items():
        mine = infos[0]["features"][name]
        assert {key: mine[key] for key in ("dtype", "shape", "names")} == {
            key: feature[key] for key in ("dtype", "shape", "names")
        }
        assert feature.get("info", {}).items() <= mine.get("info", {}).items()


def test_a_grown_golden_dataset_keeps_its_episodes(tmp_path):
    root = shutil.copytree(DATASET, tmp_path / "grown")
    with DatasetWriter(root, DatasetReader(root).schema) as writer:
        writer.add(columns(2), "a new task")
        writer.add(columns(0), VALUES.TASKS[0])
    reader = DatasetReader(root)
    assert len(reader) == 7 and reader.problems == () and reader.tasks[-1] == "a new task"
    for number, source in {0: 0, 4: 4, 5: 2, 6: 0}.items():
        read = reader.read(number)
        assert np.array_equal(read.columns["ticks"], columns(source)["ticks"])
        assert np.array_equal(read.columns[WRIST], columns(source)[WRIST])
        assert np.abs(read.columns[FRONT].astype(int) - columns(source)[FRONT]).mean() < 1.5
    schemas = [pq.read_schema(path) for path in sorted((root / "meta" / "episodes").rglob("*.parquet"))]
    assert len(schemas) > 1 and all(item.remove_metadata() == schemas[0].remove_metadata() for item in schemas)


# -- statistics against their definitions, number by number ------------------------------------------------------------


PICTURE = Feature("image", (4, 5, 3))


def smallest_that_reaches(values: np.ndarray, share: float) -> float:
    """The definition: the smallest value that at least ``share`` of all do not exceed."""
    return min(value for value in values if (values <= value).mean() >= share - 1e-12)


@pytest.mark.parametrize("count", [1, 2, 7, 100, 101])
def test_numbers_by_their_definition(count):
    values = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
    found = episode_statistics({"x": values}, {"x": Feature("float32", (3,))})["x"]
    for entry in range(3):
        column = values[:, entry].astype(float)
        assert found["min"][entry] == column.min() and found["max"][entry] == column.max()
        assert found["mean"][entry] == pytest.approx(sum(column) / count, abs=1e-12)
        assert found["std"][entry] == pytest.approx((sum((column - column.mean()) ** 2) / count) ** 0.5, abs=1e-12)
        for name, share in QUANTILES.items():
            assert found[name][entry] == smallest_that_reaches(column, share), name
    assert found["count"].tolist() == [count]


def test_pictures_are_per_channel_between_zero_and_one():
    frames = np.random.default_rng(0).integers(0, 200, (6, 4, 5, 3), dtype=np.uint8)
    found = episode_statistics({"x": frames}, {"x": PICTURE})["x"]
    assert {value.shape for name, value in found.items() if name != "count"} == {(3, 1, 1)}
    for channel in range(3):
        values = frames[..., channel].ravel() / 255.0
        assert found["mean"][channel, 0, 0] == pytest.approx(values.mean(), abs=1e-12)
        assert found["std"][channel, 0, 0] == pytest.approx(values.std(), abs=1e-12)
        assert found["min"][channel, 0, 0] == values.min() and found["max"][channel, 0, 0] == values.max()
        for name, share in QUANTILES.items():
            assert found[name][channel, 0, 0] == smallest_that_reaches(values, share), name
    assert found["count"].tolist() == [6]


def test_long_and_large_pictures_are_sampled():
    assert np.array_equal(sampled_frames(50), np.arange(50)) and len(sampled_frames(100)) == 100
    assert len(sampled_frames(10_000)) == 1000 and sampled_frames(10_000)[[0, -1]].tolist() == [0, 9999]
    assert len(sampled_frames(10**6)) == 10_000
    frames = np.zeros((2, 320, 300, 3), np.uint8)
    frames[:, 1::2] = 255  # between the sampled rows
    assert episode_statistics({"x": frames}, {"x": PICTURE})["x"]["max"].max() == 0


@pytest.mark.parametrize(
    ("values", "feature", "shape"),
    [
        (np.arange(5), Feature("int64"), (1,)),
        (np.array([True, False]), Feature("bool"), (1,)),
        (np.zeros((4, 2, 3)), Feature("float64", (2, 3)), (3,)),
    ],
)
def test_shapes_are_those_of_lerobot(values, feature, shape):
    found = episode_statistics({"x": values}, {"x": feature})["x"]
    assert all(item.shape == ((1,) if name == "count" else shape) for name, item in found.items())
    assert found["min"].dtype == values.dtype and found["count"] == len(values)


def test_parts_are_combined_as_if_they_had_been_one():
    random = np.random.default_rng(3)
    parts = [random.normal(i, 1 + i, (5 + 3 * i, 2)) for i in range(4)]
    feature = {"x": Feature("float64", (2,))}
    split = [episode_statistics({"x": part}, feature) for part in parts]
    one, whole = combined(split)["x"], episode_statistics({"x": np.concatenate(parts)}, feature)["x"]
    for name in ("min", "max", "mean", "std", "count"):
        np.testing.assert_allclose(one[name], whole[name], rtol=1e-12, err_msg=name)
    weights = np.array([len(part) for part in parts])
    for name in QUANTILES:
        wanted = sum(w * item["x"][name] for w, item in zip(weights, split, strict=True)) / weights.sum()
        np.testing.assert_allclose(one[name], wanted, rtol=1e-12, err_msg=name)


def test_they_survive_json_exactly():
    found = episode_statistics({"x": np.random.default_rng(0).normal(size=(4, 2))}, {"x": Feature("float64", (2,))})
    restored = stats_from_json(stats_to_json(found))
    assert all(np.array_equal(found["x"][name], restored["x"][name]) for name in found["x"])


def test_depth_is_what_its_own_loader_gives():
    """Millimetres of a video and metres of TIFFs, two episodes of each."""
    found = load_demonstrations(GOLDEN / "depth", cameras=["film", "still"])
    with np.load(GOLDEN / "depth" / "read.npz") as file:
        film, still = (file[f"observation.images.{name}"] for name in ("film", "still"))
    assert found.images["film"].dtype == np.uint16 and found.images["still"].dtype == np.float32
    assert film.min() < 250 and film.max() == 10_000 and len(film) == 7
    assert np.abs(found.images["film"][..., 0] - film).max() <= 1  # it rounds in float32
    assert (found.images["film"][..., 0] != film).mean() < 1e-3
    assert np.array_equal(found.images["still"][..., 0], still)
