"""What the payload of a record holds, by the record's kind: a control step, the end of an episode, an event.

The one event there is introduces a robot: before its first episode it says the spec of what it sends.  Everything is
read as what another machine may have written: bounded, checked, and refused in one sentence.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from vla_rl.contract import wire
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError

MAX_CAMERAS, MAX_LABELS, MAX_LABEL = 16, 64, 1024  # and entries of a label
_FAR = 10.0  # ranges beyond the declared one, within which a number is believed
_FARTHEST = 1e6  # without a declared range
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_OURS = re.compile(r"action|task|timestamp|(frame_|episode_|task_)?index|observation\..*")  # columns that are no label
_MAX_AXES = 5  # of a column
_FIELDS = ("images", "state", "time", "action", "labels")
_Picture = tuple[bytes, tuple[int, ...] | None]  # and the shape that it should have
LOSSLESS = 0  # in place of a JPEG quality
MAX_SIDE = 4096  # pixels
_MODES = {1: "L", 3: "RGB"}
MAX_OUTCOME = 64  # characters
_MOST_STEPS, _MOST_SECONDS = 1 << 31, 1e9  # so that sums of them stay numbers
_TYPES = {"outcome": str, "steps": int, "intervened": int, "clipped": int, "seconds": float}  # of an episode's end
_INTRODUCTION = "introduction"
_CAMERA = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # it becomes a column, and a folder, of a dataset
_MAX_NUMBERS, _MAX_TEXTS = 4096, 10_000


@dataclass(frozen=True)
class FleetStep:
    """One control step of a robot.

    images  {camera: uint8 [h,w,c]}
    state   float32 [S]
    time    control steps since the episode began
    action  float32 [D]  what was executed
    labels  {column of a dataset: array [...]}: who chose the action, what was asked for, ...
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    time: int
    action: np.ndarray
    labels: Mapping[str, Any]

    def payload(self, quality: int) -> bytes:
        """The step as bytes; pictures as JPEG of ``quality``, or as PNG where that is ``LOSSLESS``."""
        images = {name: encode_picture(image, quality) for name, image in self.images.items()}
        return wire.pack(vars(self) | {"images": images})

    @classmethod
    def from_payload(cls, payload: bytes, spec: EnvSpec | None = None) -> FleetStep:
        """What :meth:`payload` packed; raises ContractError for any other bytes, numbers that are not finite, and a
        step that does not fit ``spec``, the robot's own.
        """
        images, state, time, action, labels = _read(payload, spec)
        seen = {name: decode_picture(data, shape) for name, (data, shape) in images.items()}
        return cls(seen, state, time, action, labels)


def check_step(payload: bytes, spec: EnvSpec | None) -> None:
    """Raise ContractError where ``FleetStep.from_payload`` would, without decoding pictures."""
    for data, shape in _read(payload, spec)[0].values():
        check_picture(data, shape)


def _read(
    payload: bytes, spec: EnvSpec | None
) -> tuple[dict[str, _Picture], np.ndarray, int, np.ndarray, dict[str, np.ndarray]]:
    """The fields of a step, with encoded pictures; raises ContractError."""
    message = wire.unpack(payload)
    if not isinstance(message, dict) or message.keys() != set(_FIELDS):
        raise _bad_step(f"not the fields {', '.join(_FIELDS)}")
    images, state, time, action, labels = (message[name] for name in _FIELDS)
    if not isinstance(images, dict) or len(images) > MAX_CAMERAS or not _are(bytes, images):
        raise _bad_step("no pictures by camera")
    if not _is_vector(state) or not _is_vector(action):
        raise _bad_step("a state or an action that is not finite float32 [n]")
    if type(time) is not int or time < 0:
        raise _bad_step(f"the time {time!r:.80}")
    if not isinstance(labels, dict) or not _are(np.ndarray, labels) or len(labels) > MAX_LABELS:
        raise _bad_step("labels that are no arrays")
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or _OURS.fullmatch(name) or not _is_label(value):
            raise _bad_step(
                f"a label {name[:100]!r} that is empty, too large or not finite, or has another name than a column"
            )
    if spec is None:
        return {name: (data, None) for name, data in images.items()}, state, time, action, labels
    if images.keys() != spec.images.keys():
        raise _bad_step(f"the cameras {sorted(images)!r:.200}, not {sorted(spec.images)}")
    _check_range("state", state, spec.state)
    _check_range("action", action, spec.action)
    return {name: (data, spec.images[name].shape) for name, data in images.items()}, state, time, action, labels


def _is_vector(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.float32
        and value.ndim == 1
        and bool(np.isfinite(value).all())
    )


def _is_label(value: np.ndarray) -> bool:
    """Whether a column of a dataset can hold it."""
    if not 0 < value.size <= MAX_LABEL or value.ndim > _MAX_AXES or not np.isfinite(value).all():
        return False
    return value.dtype != np.uint64 or bool((value <= np.iinfo(np.int64).max).all())


def _check_range(name: str, value: np.ndarray, spec: ArraySpec) -> None:
    if value.shape != spec.shape:
        raise _bad_step(f"{name} {list(value.shape)}, not {list(spec.shape)}")
    low, high = (np.asarray(bound, np.float64) for bound in (spec.low, spec.high))
    known = np.isfinite(low) & np.isfinite(high)
    reach = np.where(known, _FAR * np.where(known, high - low, 0.0), _FARTHEST)
    low, high = np.where(known, low, 0.0) - reach, np.where(known, high, 0.0) + reach
    if not ((value >= low) & (value <= high)).all():
        raise _bad_step(f"a {name} that is far out of its range (up to {np.abs(value).max():.3g})")


def _are(kind: type, values: dict[str, Any]) -> bool:
    return all(isinstance(value, kind) for value in values.values())


def _bad_step(what: str) -> ContractError:
    return ContractError(f"a control step holds {what}, so its episode is not used; look at the program that made it.")


def encode_picture(picture: np.ndarray, quality: int) -> bytes:
    """``picture`` uint8 [h,w,c] with c = 1 or 3, as JPEG of ``quality`` 1 to 100 or as PNG (``LOSSLESS``).

    The picture's colours are kept at full resolution (4:4:4).  Raises ContractError for another shape or type.
    """
    shape = picture.shape
    if picture.dtype != np.uint8 or len(shape) != 3 or shape[2] not in _MODES or not 0 < max(shape[:2]) <= MAX_SIDE:
        raise ContractError(
            f"a picture is {picture.dtype}{list(shape)}, so it is not sent; give uint8 [h,w,1] or [h,w,3] of at most "
            f"{MAX_SIDE} pixels a side."
        )
    image, data = Image.fromarray(picture.squeeze(2) if shape[2] == 1 else picture), io.BytesIO()
    if quality == LOSSLESS:
        image.save(data, "PNG", compress_level=1)
    else:
        image.save(data, "JPEG", quality=quality, subsampling=0)
    return data.getvalue()


def decode_picture(data: bytes, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """The picture uint8 [h,w,c] in ``data``.

    Raises ContractError for anything but a JPEG or PNG of at most ``MAX_SIDE`` pixels a side, or of another ``shape``
    where one is given, before memory for it is allocated.
    """
    with _opened(data, shape) as image:
        array = np.array(image)
    return array if array.ndim == 3 else array[..., None]


def check_picture(data: bytes, shape: tuple[int, ...] | None = None) -> None:
    """Raise ContractError where :func:decode_picture` would, as far as the beginning of ``data`` says."""
    with _opened(data, shape):
        pass


@contextmanager
def _opened(data: bytes, shape: tuple[int, ...] | None) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if max(image.size) > MAX_SIDE or image.mode not in _MODES.values():
                raise _unreadable(f"{image.mode} of {image.size[0]}x{image.size[1]} pixels", data)
            if shape not in (None, (image.size[1], image.size[0], 1 if image.mode == "L" else 3)):
                raise _unreadable(
                    f"{image.mode} of {image.size[0]}x{image.size[1]} pixels, not {list(shape or ())}", data
                )
            yield image
    except ContractError:  # said already
        raise
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(str(error) or type(error).__name__, data) from error


def _unreadable(what: str, data: bytes) -> ContractError:
    return ContractError(
        f"a picture of {len(data)} bytes cannot be read ({what:.200}), so its step is dropped; look at the sender."
    )


@dataclass(frozen=True)
class EpisodeEnd:
    """The end of an episode of ``steps`` control steps, of which a person chose ``intervened`` and the supervisor
    changed ``clipped``.

    ``outcome`` is a cause as in ``Step.cause``; "success" is one.  Raises ContractError for numbers that cannot be.
    """

    outcome: str
    steps: int
    intervened: int
    clipped: int
    seconds: float

    def __post_init__(self) -> None:
        counts = (self.intervened, self.clipped)
        if not 0 < len(self.outcome) <= MAX_OUTCOME or not self.outcome.isprintable():
            raise _bad_end(f"the outcome {self.outcome!r:.80}")
        if not 0 <= self.steps <= _MOST_STEPS or not all(0 <= count <= self.steps for count in counts):
            raise _bad_end(f"{self.steps} steps, of which {self.intervened} intervened and {self.clipped} clipped")
        if not 0 <= self.seconds <= _MOST_SECONDS:
            raise _bad_end(f"a length of {self.seconds!r} s")

    @property
    def success(self) -> bool:
        return self.outcome == "success"

    def payload(self) -> bytes:
        return wire.pack(asdict(self))

    @classmethod
    def from_payload(cls, payload: bytes) -> EpisodeEnd:
        """What :meth:`payload` packed; raises ContractError for any other bytes."""
        message = wire.unpack(payload)
        if not isinstance(message, dict) or message.keys() != _TYPES.keys():
            raise _bad_end(f"{type(message).__name__} instead of {', '.join(_TYPES)}")
        for name, kind in _TYPES.items():
            if type(message[name]) is not kind:
                raise _bad_end(f"{name} {message[name]!r:.80}")
        return cls(**message)


def _bad_end(what: str) -> ContractError:
    return ContractError(
        f"the end of an episode says {what}, so the episode is not counted; look at the program that recorded it."
    )


def pack_introduction(spec: EnvSpec) -> bytes:
    """The payload that introduces a robot whose steps are like ``spec``."""
    return wire.pack({"event": _INTRODUCTION, "spec": spec.to_json()})


def unpack_introduction(payload: bytes) -> EnvSpec | None:
    """The spec in the payload of an event; None for another event.

    Raises ContractError for bytes that are no event, and for a spec that cannot be read.
    """
    message = wire.unpack(payload)
    if not isinstance(message, dict) or type(message.get("event")) is not str:
        raise ContractError("an event says not what it is, so it is not used; look at the program that made it.")
    if message["event"] != _INTRODUCTION:
        return None
    if not isinstance(message.get("spec"), dict):
        raise ContractError("a robot's introduction has no spec, so its episodes cannot be read; update its vla-rl.")
    if not _is_plain(message["spec"]):
        raise _bad_introduction("holds arrays or bytes")
    return _checked(EnvSpec.from_json(message["spec"]))


def _is_plain(value: Any, depth: int = 8) -> bool:
    """Whether it is what JSON has, nested no deeper than a spec is."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(item, depth - 1) for item in inner)
    return value is None or isinstance(value, bool | int | float | str)


def _checked(spec: EnvSpec) -> EnvSpec:
    """``spec`` if every field is of its kind and bounded; raises ContractError otherwise."""
    texts = (*spec.tasks, *spec.families, *spec.state.names, *spec.action.names, spec.name)
    if len(texts) > _MAX_TEXTS or not all(isinstance(text, str) and len(text) <= 1024 for text in texts):
        raise _bad_introduction("has a name or a task that is no text of at most 1024 characters")
    if not (_is_number(spec.control_dt) and 1e-4 <= spec.control_dt <= 1e4):
        raise _bad_introduction(f"has the control rate {spec.control_dt!r:.80}")
    if len(spec.images) > MAX_CAMERAS or not all(map(_CAMERA.fullmatch, spec.images)):
        raise _bad_introduction("has too many cameras, or one that is not 1 to 64 letters, digits, '.', '_' or '-'")
    for name, item in spec.images.items():
        if not _is_array(item, 3, MAX_SIDE) or item.shape[2] not in (1, 3):
            raise _bad_introduction(f"has no picture [h,w,1] or [h,w,3] of camera {name!r}")
    if not _is_array(spec.state, 1, _MAX_NUMBERS, 0) or not _is_array(spec.action, 1, _MAX_NUMBERS):
        raise _bad_introduction("has a state or an action that is no vector with its range")
    return spec


def _is_array(item: ArraySpec, ndim: int, most: int, least: int = 1) -> bool:
    if len(item.shape) != ndim or not all(type(size) is int and least <= size <= most for size in item.shape):
        return False
    bounds = [bound if isinstance(bound, tuple) else (bound,) for bound in (item.low, item.high)]
    return all(len(bound) in (1, item.shape[-1]) and all(map(_is_number, bound)) for bound in bounds)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and not math.isnan(value)  # type: ignore[arg-type]


def _bad_introduction(what: str) -> ContractError:
    return ContractError(f"a robot's introduction {what}, so its episodes cannot be read; update its vla-rl.")
