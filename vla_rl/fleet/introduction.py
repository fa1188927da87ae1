"""What a robot says of itself before its first episode: a record of kind "event" with the spec of what it sends."""

from __future__ import annotations

import math
import re
from typing import Any

from vla_rl.contract import wire
from vla_rl.contract.env import ArraySpec, EnvSpec
from vla_rl.contract.errors import ContractError
from vla_rl.fleet.pictures import MAX_SIDE
from vla_rl.fleet.step import MAX_CAMERAS

_NAME = "introduction"
_CAMERA = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")  # it becomes a column, and a folder, of a dataset
_MAX_NUMBERS, _MAX_TEXTS = 4096, 10_000


def pack_introduction(spec: EnvSpec) -> bytes:
    """The payload that introduces a robot whose steps are like ``spec``."""
    return wire.pack({"event": _NAME, "spec": spec.to_json()})


def unpack_introduction(payload: bytes) -> EnvSpec | None:
    """The spec in the payload of an event; None for another event.

    Raises ContractError for bytes that are no event, and for a spec that cannot be read.
    """
    message = wire.unpack(payload)
    if not isinstance(message, dict) or type(message.get("event")) is not str:
        raise ContractError("an event says not what it is, so it is not used; look at the program that made it.")
    if message["event"] != _NAME:
        return None
    if not isinstance(message.get("spec"), dict):
        raise ContractError("a robot's introduction has no spec, so its episodes cannot be read; update its vla-rl.")
    if not _is_plain(message["spec"]):
        raise _refused("holds arrays or bytes")
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
        raise _refused("has a name or a task that is no text of at most 1024 characters")
    if not (_is_number(spec.control_dt) and 1e-4 <= spec.control_dt <= 1e4):
        raise _refused(f"has the control rate {spec.control_dt!r:.80}")
    if len(spec.images) > MAX_CAMERAS or not all(map(_CAMERA.fullmatch, spec.images)):
        raise _refused("has too many cameras, or one whose name is not 1 to 64 letters, digits, '.', '_' or '-'")
    for name, item in spec.images.items():
        if not _is_array(item, 3, MAX_SIDE) or item.shape[2] not in (1, 3):
            raise _refused(f"has no picture [h,w,1] or [h,w,3] of camera {name!r}")
    if not _is_array(spec.state, 1, _MAX_NUMBERS, 0) or not _is_array(spec.action, 1, _MAX_NUMBERS):
        raise _refused("has a state or an action that is no vector with its range")
    return spec


def _is_array(item: ArraySpec, ndim: int, most: int, least: int = 1) -> bool:
    if len(item.shape) != ndim or not all(type(size) is int and least <= size <= most for size in item.shape):
        return False
    bounds = [bound if isinstance(bound, tuple) else (bound,) for bound in (item.low, item.high)]
    return all(len(bound) in (1, item.shape[-1]) and all(map(_is_number, bound)) for bound in bounds)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and not math.isnan(value)  # type: ignore[arg-type]


def _refused(what: str) -> ContractError:
    return ContractError(f"a robot's introduction {what}, so its episodes cannot be read; update its vla-rl.")
