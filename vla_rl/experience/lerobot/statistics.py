"""Statistics of one episode and of a dataset, with lerobot's names, shapes and rules.

``{feature: {min, max, mean, std, count, q01, q10, q50, q90, q99}}``.  Statistics of a vector are per entry; those of
pictures are per channel, divided by 255, with shape (c,1,1), from a sample of frames.  The numbers differ from
lerobot's in two ways: means and deviations are computed in float64 (lerobot 0.4.4 uses float32 for float32 data and
squares pictures as uint8, so its deviations of pictures are wrong), and an episode's quantiles are exact (the smallest
value that at least this share does not exceed), whereas lerobot reads them off a histogram of 5000 bins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from vla_rl.experience.lerobot.features import Feature, is_numeric

Stats: TypeAlias = dict[str, dict[str, np.ndarray]]
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
_LARGEST_SIDE, _SAMPLED_SIDE = 300, 150


def has_statistics(feature: Feature) -> bool:
    """Whether a column has statistics: pictures and numbers do."""
    return feature.is_camera or is_numeric(feature.dtype)


def episode_statistics(columns: Mapping[str, np.ndarray], features: Mapping[str, Feature]) -> Stats:
    """Statistics of the ``columns`` {name: [n,*shape] or [n]} of one episode, n >= 1."""
    found: Stats = {}
    for name, values in columns.items():
        if features[name].is_camera:
            found[name] = _of_pictures(values)
        elif has_statistics(features[name]):
            found[name] = _of_numbers(values)
    return found


def combined(parts: Sequence[Stats]) -> Stats:
    """Statistics of all episodes from those of each.

    Count, minimum, maximum, mean and deviation are exact; quantiles are, as in lerobot, the means of the parts'
    quantiles weighted by their counts.
    """
    names = {name: None for part in parts for name in part}
    return {name: _combine([part[name] for part in parts if name in part]) for name in names}


def to_json(stats: Stats) -> dict[str, dict[str, list[object]]]:
    """As in ``stats.json``."""
    return {name: {key: value.tolist() for key, value in item.items()} for name, item in stats.items()}


def from_json(data: Mapping[str, Mapping[str, object]]) -> Stats:
    """Back from ``stats.json``."""
    return {name: {key: np.asarray(value) for key, value in item.items()} for name, item in data.items()}


def sampled_frames(count: int) -> np.ndarray:
    """The frames that statistics of pictures are taken from: count^0.75 of ``count``, at least 100, evenly spaced."""
    wanted = max(min(100, count), min(int(count**0.75), 10_000))
    return np.round(np.linspace(0, count - 1, wanted)).astype(int)


def _of_numbers(values: np.ndarray) -> dict[str, np.ndarray]:
    table = values.reshape(len(values), -1) if values.ndim < 3 else values.reshape(-1, values.shape[-1])
    numbers = table.astype(np.float64)
    ordered = np.sort(numbers, axis=0)
    return {
        "min": table.min(0),
        "max": table.max(0),
        "mean": numbers.mean(0),
        "std": numbers.std(0),
        "count": np.array([len(values)]),
        **{name: ordered[_rank(share, len(ordered))] for name, share in QUANTILES.items()},
    }


def _of_pictures(frames: np.ndarray) -> dict[str, np.ndarray]:
    count, height, width, channels = frames.shape
    longest = max(height, width)
    stride = longest // _SAMPLED_SIDE if longest >= _LARGEST_SIDE else 1
    chosen = frames[sampled_frames(count)][:, ::stride, ::stride]
    levels = np.arange(256) / 255.0
    columns: list[list[float]] = []
    for channel in range(channels):
        counts = np.bincount(chosen[..., channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean = float(share @ levels)
        std = float(np.sqrt(share @ (levels - mean) ** 2))
        present, cumulative = np.flatnonzero(counts), np.cumsum(counts)
        ranks = (levels[np.searchsorted(cumulative, _rank(q, cumulative[-1]) + 1)] for q in QUANTILES.values())
        columns.append([levels[present[0]], levels[present[-1]], mean, std, *ranks])
    names = [name for name in NAMES if name != "count"]
    rows = np.array(columns).T.reshape(len(names), channels, 1, 1)
    return {**dict(zip(names, rows, strict=True)), "count": np.array([len(chosen)])}


def _rank(share: float, count: int) -> int:
    """Index, among ``count`` ordered values, of the first that at least ``share`` of them do not exceed."""
    return max(int(np.ceil(share * count - 1e-9)) - 1, 0)


def _combine(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    counts = np.array([float(part["count"][0]) for part in parts])
    weights = counts / counts.sum()

    def weighted(values: list[np.ndarray]) -> np.ndarray:
        return np.asarray(np.tensordot(weights, np.stack(values).astype(np.float64), 1))

    mean = weighted([part["mean"] for part in parts])
    variance = weighted([np.asarray(part["std"]) ** 2 + (part["mean"] - mean) ** 2 for part in parts])
    whole = {
        "min": np.stack([part["min"] for part in parts]).min(0),
        "max": np.stack([part["max"] for part in parts]).max(0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": np.array([int(counts.sum())]),
    }
    shared = [name for name in QUANTILES if all(name in part for part in parts)]
    return whole | {name: weighted([part[name] for part in parts]) for name in shared}
