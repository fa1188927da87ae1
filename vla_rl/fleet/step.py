"""What a record of kind "step" holds: what the robot saw before a control step, and the labels of that step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.contract import wire
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError
from vla_rl.fleet import pictures

MAX_CAMERAS, MAX_LABELS, MAX_LABEL = 16, 64, 1024  # and entries of a label
_FAR = 10.0  # ranges beyond the declared one, within which a number is believed
_FARTHEST = 1e6  # without a declared range
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_OURS = re.compile(r"action|task|timestamp|(frame_|episode_|task_)?index|observation\..*")  # columns that are no label
_MAX_AXES = 5  # of a column
_FIELDS = ("images", "state", "time", "action", "labels")


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
        """The step as bytes; pictures as JPEG of ``quality``, or as PNG where that is ``pictures.LOSSLESS``."""
        images = {name: pictures.encode(image, quality) for name, image in self.images.items()}
        return wire.pack(vars(self) | {"images": images})

    @classmethod
    def from_payload(cls, payload: bytes, spec: EnvSpec | None = None) -> FleetStep:
        """What :meth:`payload` packed; raises ContractError for any other bytes, numbers that are not finite, and a
        step that does not fit ``spec``, the robot's own.
        """
        images, state, time, action, labels = _read(payload, spec)
        seen = {name: pictures.decode(data, shape) for name, (data, shape) in images.items()}
        return cls(seen, state, time, action, labels)


def check_step(payload: bytes, spec: EnvSpec | None) -> None:
    """Raise ContractError where ``FleetStep.from_payload`` would, without decoding pictures."""
    for data, shape in _read(payload, spec)[0].values():
        pictures.check(data, shape)


_Picture = tuple[bytes, tuple[int, ...] | None]  # and the shape that it should have


def _read(
    payload: bytes, spec: EnvSpec | None
) -> tuple[dict[str, _Picture], np.ndarray, int, np.ndarray, dict[str, np.ndarray]]:
    """The fields of a step, with encoded pictures; raises ContractError."""
    message = wire.unpack(payload)
    if not isinstance(message, dict) or message.keys() != set(_FIELDS):
        raise _refused(f"not the fields {', '.join(_FIELDS)}")
    images, state, time, action, labels = (message[name] for name in _FIELDS)
    if not isinstance(images, dict) or len(images) > MAX_CAMERAS or not _are(bytes, images):
        raise _refused("no pictures by camera")
    if not _is_vector(state) or not _is_vector(action):
        raise _refused("a state or an action that is not finite float32 [n]")
    if type(time) is not int or time < 0:
        raise _refused(f"the time {time!r:.80}")
    if not isinstance(labels, dict) or not _are(np.ndarray, labels) or len(labels) > MAX_LABELS:
        raise _refused("labels that are no arrays")
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or _OURS.fullmatch(name) or not _is_label(value):
            raise _refused(
                f"a label {name[:100]!r} that is empty, too large or not finite, or has another name than a column"
            )
    if spec is None:
        return {name: (data, None) for name, data in images.items()}, state, time, action, labels
    if images.keys() != spec.images.keys():
        raise _refused(f"the cameras {sorted(images)!r:.200}, not {sorted(spec.images)}")
    _check("state", state, spec.state)
    _check("action", action, spec.action)
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


def _check(name: str, value: np.ndarray, spec: ArraySpec) -> None:
    if value.shape != spec.shape:
        raise _refused(f"{name} {list(value.shape)}, not {list(spec.shape)}")
    low, high = (np.asarray(bound, np.float64) for bound in (spec.low, spec.high))
    known = np.isfinite(low) & np.isfinite(high)
    reach = np.where(known, _FAR * np.where(known, high - low, 0.0), _FARTHEST)
    low, high = np.where(known, low, 0.0) - reach, np.where(known, high, 0.0) + reach
    if not ((value >= low) & (value <= high)).all():
        raise _refused(f"a {name} that is far out of its range (up to {np.abs(value).max():.3g})")


def _are(kind: type, values: dict[str, Any]) -> bool:
    return all(isinstance(value, kind) for value in values.values())


def _refused(what: str) -> ContractError:
    return ContractError(f"a control step holds {what}, so its episode is not used; look at the program that made it.")
