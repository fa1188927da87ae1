"""The columns of a dataset, their types on disk, their description in ``info.json``, and their statistics.

Statistics have lerobot's names, shapes and rules: ``{feature: {min, max, mean, std, count, q01, q10, q50, q90, q99}}``.
Those of a vector are per entry; those of pictures are per channel, divided by 255, with shape (c,1,1), from a sample of
frames.  The numbers differ from lerobot's in two ways: means and deviations are computed in float64 (lerobot 0.4.4 uses
float32 for float32 data and squares pictures as uint8, so its deviations of pictures are wrong), and an episode's
quantiles are exact (the smallest value that at least this share does not exceed), whereas lerobot reads them off a
histogram of 5000 bins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from vla_rl.contract.errors import ContractError

VERSION = "v3.0"
# Columns that every dataset has; the writer fills them in.
INDEX: dict[str, str] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
MOST_NUMBERS = 1 << 26  # in a frame of one column
_RATES = (1e-4, 1e5)  # frames per second
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
Stats: TypeAlias = dict[str, dict[str, np.ndarray]]
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)
_LARGEST_SIDE, _SAMPLED_SIDE = 300, 150


@dataclass(frozen=True)
class Feature:
    """One column: ``dtype`` is a numpy name, "string", "image" (PNG bytes) or "video"; ``shape`` is that of one frame.

    A camera's shape is (h, w, c).  ``names`` labels the entries, as a list or in any other JSON form; ``info`` says how
    a video is encoded.
    """

    dtype: str
    shape: tuple[int, ...] = (1,)
    names: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_picture(self) -> bool:
        return self.dtype in ("image", "video")

    @property
    def is_depth(self) -> bool:
        """Whether a frame is a picture of distances."""
        return self.is_picture and bool(self.info.get("is_depth_map") or self.info.get("video.is_depth_map"))

    @property
    def is_camera(self) -> bool:
        """Whether a frame is a picture of colours or of one brightness."""
        return self.is_picture and not self.is_depth

    @property
    def channels(self) -> int:
        """In which a picture is read."""
        return 1 if len(self.shape) == 2 or 1 in (*self.shape[:1], *self.shape[-1:]) else 3

    def labels(self) -> tuple[str, ...]:
        """The names of a vector's entries; () when there are none or their number is wrong."""
        names = self.names
        if isinstance(names, Mapping):  # {"motors": [...]}
            names = [item for group in names.values() if isinstance(group, list) for item in group]
        fits = isinstance(names, list | tuple) and (len(names),) == self.shape
        return tuple(map(str, names)) if fits else ()

    def to_json(self) -> dict[str, Any]:
        """As in ``info.json``."""
        names = list(self.names) if isinstance(self.names, tuple) else self.names
        entry = {"dtype": self.dtype, "shape": list(self.shape), "names": names}
        return entry | ({"info": dict(self.info)} if self.info else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Feature:
        """Read an entry of ``info.json``; raises KeyError or TypeError for anything else."""
        shape = tuple(map(int, data["shape"])) or (1,)  # some write [] for one number
        info = data.get("info") or data.get("video_info") or {}  # the second in v2
        return cls(str(data["dtype"]), shape, data.get("names"), info)


@dataclass(frozen=True)
class Schema:
    """Frames per second, the robot's name and the columns besides those in ``INDEX``, in their order."""

    fps: float
    features: Mapping[str, Feature]
    robot: str = ""

    def __post_init__(self) -> None:
        if not _RATES[0] <= self.fps <= _RATES[1]:
            raise ContractError(
                f"{self.fps} frames per second are impossible, so no frame would have a time; give a positive number."
            )
        for name, feature in self.features.items():
            _check_feature(name, feature)

    def frame_bytes(self, names: Iterable[str]) -> int:
        """Of the columns ``names`` in memory, texts left out."""
        return sum(
            (1 if item.is_camera else 8) * math.prod(item.shape)
            for item in (self.features[name] for name in names)
            if item.dtype != "string"
        )

    @property
    def cameras(self) -> list[str]:
        return [name for name, feature in self.features.items() if feature.is_camera]

    @property
    def videos(self) -> list[str]:
        """Columns that are MP4 files."""
        return [name for name, feature in self.features.items() if feature.dtype == "video"]

    def stored(self) -> dict[str, Feature]:
        """The parquet columns in their order: everything but videos, then ``INDEX``."""
        columns = {name: feature for name, feature in self.features.items() if feature.dtype != "video"}
        return columns | {name: Feature(dtype) for name, dtype in INDEX.items()}

    def arrow(self) -> pa.Schema:
        """The parquet schema, with the metadata that Hugging Face datasets needs."""
        fields = [pa.field(name, arrow_type(item), metadata=_extension(item)) for name, item in self.stored().items()]
        description = {"info": {"features": {name: _hugging_face(item) for name, item in self.stored().items()}}}
        return pa.schema(fields, metadata={"huggingface": json.dumps(description)})

    def to_json(self) -> dict[str, Any]:
        """``robot_type``, ``fps`` and ``features`` as in ``info.json``.

        lerobot writes whole frames per second; ours stay fractional where the control rate is (it reads them).
        """
        everything = dict(self.features) | {name: Feature(dtype) for name, dtype in INDEX.items()}
        fps = int(self.fps) if float(self.fps).is_integer() else float(self.fps)
        features = {name: feature.to_json() for name, feature in everything.items()}
        return {"robot_type": self.robot or None, "fps": fps, "features": features}

    @classmethod
    def from_json(cls, info: Mapping[str, Any]) -> Schema:
        """Read ``info.json``; raises KeyError, TypeError or ValueError for anything else."""
        features = {name: Feature.from_json(item) for name, item in info["features"].items() if name not in INDEX}
        return cls(float(info["fps"]), features, str(info.get("robot_type") or ""))


def arrow_type(feature: Feature) -> pa.DataType:
    """The parquet type of a column: (1,) is a plain value, (n,) a list of fixed size, more axes nested lists."""
    if feature.dtype == "image":
        return IMAGE
    if feature.dtype == "string":
        return pa.string()
    kind = pa.from_numpy_dtype(np.dtype(feature.dtype))
    if feature.shape == (1,):
        return kind
    if len(feature.shape) == 1:
        return pa.list_(kind, feature.shape[0])
    for _ in feature.shape:
        kind = pa.list_(kind)
    return kind


def to_arrow(feature: Feature, values: np.ndarray) -> pa.Array:
    """``values`` [n,*shape] ([n] for shape (1,)) as a parquet column."""
    if feature.dtype == "string":
        return pa.array(values.reshape(-1).tolist(), pa.string())
    array: pa.Array = pa.array(values.reshape(-1), pa.from_numpy_dtype(np.dtype(feature.dtype)))
    if feature.shape == (1,):
        return array
    if len(feature.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(array, feature.shape[0])
    for size in reversed(feature.shape):
        array = pa.ListArray.from_arrays(np.arange(0, len(array) + 1, size, dtype=np.int32), array)
    return array


def from_arrow(feature: Feature, column: pa.ChunkedArray) -> np.ndarray:
    """[n,*shape] ([n] for shape (1,) and strings) of a numeric or string column.

    A text without a value is empty, and a floating-point number NaN.  Raises ValueError for other holes.
    """
    if feature.dtype == "string":
        return np.array([text or "" for text in column.to_pylist()], dtype=np.str_)
    if pa.types.is_floating(column.type):
        column = column.fill_null(math.nan)
    if column.null_count:
        raise ValueError(f"has no value in {column.null_count} of {len(column)} frames")
    flat = column.combine_chunks()
    while pa.types.is_list(flat.type) or pa.types.is_fixed_size_list(flat.type) or pa.types.is_large_list(flat.type):
        flat = flat.flatten()
    if pa.types.is_floating(flat.type):
        flat = flat.fill_null(math.nan)
    if flat.null_count:
        raise ValueError(f"has {flat.null_count} entries without a value")
    found = flat.to_numpy(zero_copy_only=False)
    values = found.astype(feature.dtype)
    if values.dtype.kind in "iu" and not np.array_equal(values, found):
        raise ValueError(f"holds numbers that do not fit {feature.dtype}")
    shape = (len(column),) if feature.shape == (1,) else (len(column), *feature.shape)
    if values.size != np.prod(shape):
        raise ValueError(f"holds {values.size} numbers, not {len(column)} frames of {list(feature.shape)}")
    return values.reshape(shape)


def fits(feature: Feature, found: pa.DataType) -> bool:
    """Whether a column of type ``found`` holds what ``feature`` declares; precision may differ, kind and size not.

    One number may be a list of one, and text numbered.
    """
    if feature.dtype == "image":
        return bool(pa.types.is_struct(found) and {"bytes", "path"} <= {found.field(i).name for i in range(len(found))})
    if feature.dtype == "string":
        found = found.value_type if pa.types.is_dictionary(found) else found
        return bool(pa.types.is_string(found) or pa.types.is_large_string(found))
    found = getattr(found, "storage_type", found)
    depth = 0
    while pa.types.is_list(found) or pa.types.is_fixed_size_list(found) or pa.types.is_large_list(found):
        if pa.types.is_fixed_size_list(found) and (found.list_size,) != feature.shape[depth : depth + 1]:
            return False
        found, depth = found.value_type, depth + 1
    wanted = (0, 1) if feature.shape == (1,) else (len(feature.shape),)
    return depth in wanted and _kind(found) == np.dtype(feature.dtype).kind.replace("u", "i")


def _kind(found: pa.DataType) -> str:
    if pa.types.is_floating(found):
        return "f"
    return "i" if pa.types.is_integer(found) else "b" if pa.types.is_boolean(found) else str(found)


def _check_feature(name: str, feature: Feature) -> None:
    if "/" in name or name.startswith(".") or not name or name in INDEX:
        raise ContractError(
            f"{name!r} cannot be a column (no '/', no leading '.', and not one of {', '.join(INDEX)}), so lerobot "
            "would refuse the dataset; choose another name."
        )
    if not 1 <= len(feature.shape) <= 5 or min(feature.shape) < 1 or math.prod(feature.shape) > MOST_NUMBERS:
        raise ContractError(
            f"column {name!r} has frames of shape {str(list(feature.shape))[:80]}, which the format cannot hold; give "
            f"one to five axes, [1] for a number, with at most {MOST_NUMBERS:,} numbers."
        )


def is_numeric(dtype: str) -> bool:
    """Whether ``dtype`` names numbers or truth values of numpy; text, pictures and unknown types do not."""
    try:
        return np.dtype(dtype).kind in "fiub"
    except TypeError:
        return False


def _extension(feature: Feature) -> dict[str, str] | None:
    """The metadata that marks an array of several axes for Hugging Face datasets."""
    if feature.dtype in ("image", "string") or len(feature.shape) == 1:
        return None
    name = f"datasets.features.features.Array{len(feature.shape)}DExtensionType"
    description = json.dumps([list(feature.shape), feature.dtype])
    return {"ARROW:extension:name": name, "ARROW:extension:metadata": description}


def _hugging_face(feature: Feature) -> dict[str, Any]:
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    if feature.dtype == "string" or feature.shape == (1,):
        return value
    if len(feature.shape) == 1:
        return {"feature": value, "length": feature.shape[0], "_type": "List"}
    return {"shape": list(feature.shape), "dtype": feature.dtype, "_type": f"Array{len(feature.shape)}D"}


def episode_statistics(columns: Mapping[str, np.ndarray], features: Mapping[str, Feature]) -> Stats:
    """Statistics of the ``columns`` {name: [n,*shape] or [n]} of one episode, n >= 1."""
    found: Stats = {}
    for name, values in columns.items():
        if features[name].is_camera:
            found[name] = _of_pictures(values)
        elif is_numeric(features[name].dtype):
            found[name] = _of_numbers(values)
    return found


def combined(parts: Sequence[Stats]) -> Stats:
    """Statistics of all episodes from those of each.

    Count, minimum, maximum, mean and deviation are exact; quantiles are, as in lerobot, the means of the parts'
    quantiles weighted by their counts.
    """
    names = {name: None for part in parts for name in part}
    return {name: _combine([part[name] for part in parts if name in part]) for name in names}


def stats_to_json(stats: Stats) -> dict[str, dict[str, list[object]]]:
    """As in ``stats.json``."""
    return {name: {key: value.tolist() for key, value in item.items()} for name, item in stats.items()}


def stats_from_json(data: Mapping[str, Mapping[str, object]]) -> Stats:
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
