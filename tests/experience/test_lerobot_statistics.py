"""Statistics against their definitions, number by number."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.experience.lerobot.features import (
    QUANTILES,
    Feature,
    combined,
    episode_statistics,
    sampled_frames,
    stats_from_json,
    stats_to_json,
)

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
