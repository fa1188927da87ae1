"""What a record of kind "step" holds: what the robot saw before a control step, and the labels of that step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError
from vla_rl.fleet import pictures

MAX_CAMERAS = 16
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
    def from_payload(cls, payload: bytes) -> FleetStep:
        """What :meth:`payload` packed; raises ContractError for any other bytes."""
        message = wire.unpack(payload)
        if not isinstance(message, dict) or message.keys() != set(_FIELDS):
            raise _refused(f"not the fields {', '.join(_FIELDS)}")
        images, state, time, action, labels = (message[name] for name in _FIELDS)
        if not isinstance(images, dict) or len(images) > MAX_CAMERAS or not _are(bytes, images):
            raise _refused("no pictures by camera")
        if not _is_vector(state) or not _is_vector(action):
            raise _refused("a state or an action that is not float32 [n]")
        if type(time) is not int or time < 0:
            raise _refused(f"the time {time!r:.80}")
        if not isinstance(labels, dict) or not _are(np.ndarray, labels):
            raise _refused("labels that are no arrays")
        return cls({name: pictures.decode(data) for name, data in images.items()}, state, time, action, labels)


def _is_vector(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 1


def _are(kind: type, values: dict[str, Any]) -> bool:
    return all(isinstance(value, kind) for value in values.values())


def _refused(what: str) -> ContractError:
    return ContractError(f"a control step holds {what}, so its episode is not used; look at the program that made it.")
