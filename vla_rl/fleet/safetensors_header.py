"""Where the tensors of a safetensors file lie, read from its header alone: a robot's computer needs no library for it.

The format: 8 bytes with the header's length (unsigned, little-endian), the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, BinaryIO

from vla_rl.contract.errors import ContractError
from vla_rl.fleet.manifest import ITEM_BYTES

_LENGTH = 8
MAX_HEADER_BYTES = 100_000_000  # as the format's own library has it


@dataclass(frozen=True)
class TensorPlace:
    """A tensor and its number of bytes; tensors lie one after the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def read_header(file: BinaryIO, size: int) -> tuple[bytes, tuple[TensorPlace, ...]]:
    """The bytes before the tensors of a ``file`` of ``size`` bytes, and the tensors in the order in which they lie.

    Raises ContractError unless the tensors have the sizes of their shapes and fill the rest of the file without a gap.
    """
    start = file.read(_LENGTH)
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH or length > min(MAX_HEADER_BYTES, size - _LENGTH):
        raise _damaged(f"its header cannot have {length} of {size} bytes")
    header = file.read(length)
    try:
        places = _places(json.loads(header, object_pairs_hook=_distinct))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(f"{type(error).__name__}: {str(error)[:200]}") from error
    end = 0
    for begin, stop, place in places:
        if begin != end or stop - begin != place.size:
            raise _damaged(
                f"the bytes {begin} to {stop} of {place.name!r} do not follow the tensor before or its shape"
            )
        end = stop
    if end != size - _LENGTH - length:
        raise _damaged(f"its tensors have {end} bytes and the file has {size - _LENGTH - length} for them")
    return start + header, tuple(place for _, _, place in places)


def _places(header: dict[str, Any]) -> list[tuple[int, int, TensorPlace]]:
    places = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = tuple(entry["shape"])
        begin, stop = entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, stop)):
            raise ValueError(f"{name!r} has no plain shape and offsets")
        places.append((begin, stop, TensorPlace(name, entry["dtype"], shape, _size(entry["dtype"], shape))))
    return sorted(places, key=lambda place: place[:2])


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEM_BYTES[dtype] * math.prod(shape)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an entry occurs twice")
    return found


def _damaged(why: str) -> ContractError:
    return ContractError(
        f"a safetensors file cannot be read ({why}), so it is not published; save the checkpoint again."
    )
