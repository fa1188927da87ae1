"""Arrays in other people's msgpack messages: numbers with a dtype and a shape that fit their bytes, nothing else."""

from __future__ import annotations

import io
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np
from PIL import Image

from vla_rl.contract.errors import ContractError

_DTYPE = re.compile(r"[<>|=]?([biuf][1248])")  # numpy's short names of numbers; objects, records and texts have others
_MAX_AXES, _MAX_ITEMS = 8, 200_000  # entries of maps and lists in a message; an array is one entry
_MAX_PIXELS = 1 << 24  # of a compressed image, which may be far larger than its bytes
_MAX_ARRAYS = 1 << 28  # bytes of all arrays of a message, as a message may hold many such images
_MODES = {"L": 1, "RGB": 3, "RGBA": 4}  # channels


def unpack(data: bytes, hook: Callable[[dict[Any, Any]], Any]) -> Any:
    """The value of a msgpack message, with ``hook`` applied to every map; raises ContractError for other bytes."""
    items = held = 0

    def count(container: Any) -> Any:
        nonlocal items, held
        items += 1 + len(container)
        if items > _MAX_ITEMS:
            raise ContractError(f"a message holds more than {_MAX_ITEMS} entries, so it is refused; send arrays.")
        value = hook(container) if isinstance(container, dict) else container
        held += value.nbytes if isinstance(value, np.ndarray) else 0
        if held > _MAX_ARRAYS:
            raise ContractError(
                f"a message holds arrays of more than {_MAX_ARRAYS} bytes, so it is refused; send fewer."
            )
        return value

    most = min(_MAX_ITEMS, len(data))  # room is made for what is announced
    limits = {"max_map_len": most, "max_array_len": most}
    try:
        return msgpack.unpackb(data, object_hook=count, list_hook=count, ext_hook=_refuse_extension, **limits)
    except ContractError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ContractError(
            f"a message of {len(data)} bytes cannot be read ({error or type(error).__name__}), so it is refused; look "
            "at the program that sent it."
        ) from error


def read_array(dtype: Any, shape: Any, data: Any) -> np.ndarray:
    """The array of ``data`` (bytes), writable and in this machine's byte order.

    ``dtype`` is numpy's short name ("<f4") of a bool, integer or float of at most 8 bytes; an object dtype, which would
    hold a pickle, is refused like everything else.  Raises ContractError.
    """
    name = _DTYPE.fullmatch(dtype) if isinstance(dtype, str) else None
    if name is None or name[1] in ("b2", "b4", "b8", "f1"):
        raise ContractError(
            f"a message holds an array of dtype {shown(dtype)}, so it is refused; send bool, integer or float arrays."
        )
    kind = np.dtype(dtype)
    sizes = isinstance(shape, list | tuple) and len(shape) <= _MAX_AXES
    if not sizes or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ContractError(f"a message holds an array of shape {shown(shape)}, so it is refused; send sizes.")
    if not isinstance(data, bytes) or math.prod(shape) * kind.itemsize != len(data):
        found = f"{len(data)} bytes" if isinstance(data, bytes) else f"a {type(data).__name__}"
        raise ContractError(
            f"a message holds {found} as {kind}{list(shape)}, which does not fit, so it is refused; look at the "
            "program that sent it."
        )
    raw = np.frombuffer(data, np.uint8 if kind == np.bool_ else kind)
    return raw.astype(kind.newbyteorder("=")).reshape(shape)


def read_image(data: Any, shape: Any) -> np.ndarray:
    """uint8 [h,w,c] of a PNG or JPEG file, whose size must be ``shape``; raises ContractError.

    The size is read before a pixel is decoded, so a small file cannot ask for a lot of memory.
    """
    try:
        height, width, channels = shape
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as picture:
            found = (picture.height, picture.width, _MODES.get(picture.mode, 0))
            if found != (height, width, channels) or height * width > _MAX_PIXELS:
                raise ValueError(f"it is {list(found)} in mode {picture.mode!r} but declared as {shown(shape)}")
            return np.asarray(picture, np.uint8).reshape(found).copy()
    except Exception as error:  # Pillow fails in many ways at what is no picture
        raise ContractError(
            f"a message holds an image that cannot be read ({error!s:.300}), so it is refused; send PNG, JPEG "
            "or a raw array."
        ) from error


def shown(value: Any) -> str:
    """A foreign ``value`` in an error: a few characters, however large or deep it is."""
    return reprlib.repr(value)[:60]


def plain(array: np.ndarray) -> tuple[str, list[int], bytes]:
    """dtype, shape and bytes for a message; raises ContractError for an array that :func:`read_array` would refuse."""
    name = _DTYPE.fullmatch(array.dtype.str)
    if name is None:
        raise ContractError(f"an array has dtype {array.dtype}, so it is not sent; send bool, integer or float arrays.")
    return array.dtype.str, list(array.shape), array.tobytes()


def pack(message: Mapping[Any, Any], default: Callable[[Any], Any]) -> bytes:
    """``message`` as msgpack; ``default`` says how arrays are written."""
    try:
        return msgpack.packb(message, default=default)
    except (ValueError, TypeError, OverflowError) as error:
        raise ContractError(
            f"a message cannot be written ({error}), so it is not sent; use texts, numbers, lists, dicts and arrays."
        ) from error


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ContractError(f"a message holds the msgpack extension {code}, so it is refused; send arrays as maps.")
