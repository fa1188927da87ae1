"""Changed messages: bytes of any kind, and values in JSON and in contract/wire.py's messages."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError

ODD: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 5, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63), 0.5, float("inf"), float("nan")),
    *("", "x", "F32", "..", "../x", "\ud800", "é" * 70, "x" * 2000, [], [1], [0, 3], [2, 3], {}, {"x": 1}),
    *([[]], [[1], [1, 2]], "0" * 64, "step", [1, "x"], -0.1, 1e300),
)


def change_bytes(data: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """A few changes: bytes, bits, pieces removed, inserted, repeated or taken from ``others``; or cut short."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(8):
            case 0 if at < len(made):
                made[at] = draw.randrange(256)
            case 1 if at < len(made):
                made[at] ^= 1 << draw.randrange(8)
            case 2:
                del made[at : at + draw.randint(1, 8)]
            case 3:
                made[at:at] = draw.randbytes(draw.randint(1, 8))
            case 4:
                del made[at:]
            case 5:
                made[at:at] = made[at : at + draw.randint(1, 64)]
            case 6:
                other = draw.choice(others)
                begin = draw.randrange(len(other) + 1)
                made[at : at + draw.randint(0, 32)] = other[begin : begin + draw.randint(1, 64)]
            case 7:
                made[at : at + 4] = draw.choice((bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x80"))
    return bytes(made)


def change_value(value: Any, draw: random.Random) -> Any:
    """``value`` with one entry changed, missing or added, at any depth."""
    inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if _is_list(value) else []
    if inner and draw.random() < 0.8:
        key, item = draw.choice(inner)
        made: Any = dict(value) if isinstance(value, dict) else list(value)
        made[key] = change_value(item, draw)
        return made
    if isinstance(value, dict) and draw.random() < 0.5:
        made = dict(value)
        if draw.random() < 0.5 and made:
            del made[draw.choice(list(made))]
        else:
            made[draw.choice(("x", "shape", "names", "low", "__metadata__", "event"))] = draw.choice(ODD)
        return made
    if _is_list(value) and draw.random() < 0.5:
        return [*value, *(value or [draw.choice(ODD)])][: draw.randint(0, 20)]
    if isinstance(value, np.ndarray) and draw.random() < 0.7:
        return value.astype(draw.choice(("float64", "uint8", "float32", "bool"))).reshape(draw.choice(((-1,), (1, -1))))
    if isinstance(value, bool | int | float) and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 0.5))
    if isinstance(value, str) and value and draw.random() < 0.6:
        return value[:-1] + draw.choice("xé0/.")
    return draw.choice(ODD)


def change_json(data: bytes, draw: random.Random) -> bytes:
    return json.dumps(change_value(json.loads(data), draw)).encode()


def change_wire(data: bytes, draw: random.Random) -> bytes:
    try:
        return wire.pack(change_value(wire.unpack(data), draw))
    except ContractError:  # what was made of it cannot be written
        return data[:-1]


def change_header(data: bytes, draw: random.Random) -> bytes:
    """A safetensors file whose header is another one, of the right length."""
    size = int.from_bytes(data[:8], "little")
    head = change_json(data[8 : 8 + size], draw)
    return len(head).to_bytes(8, "little") + head + data[8 + size :]


def change_message(make: Callable[[], Any]) -> Callable[[bytes, random.Random], bytes]:
    """Changes one field of a protobuf message, or of a message in it."""

    def change(data: bytes, draw: random.Random) -> bytes:
        message = make()
        message.ParseFromString(data)
        _change_field(message, draw)
        return bytes(message.SerializeToString())

    return change


def _change_field(message: Any, draw: random.Random) -> None:
    fields = list(message.ListFields())
    if not fields:
        return
    field, value = draw.choice(fields)
    if field.message_type is not None:
        _change_field(draw.choice(list(value)) if field.is_repeated else value, draw)
    elif isinstance(value, bytes):
        setattr(message, field.name, draw.choice((b"", value[:-1], value + b"x", bytes(len(value)))))
    elif isinstance(value, str):
        setattr(message, field.name, draw.choice(("", value + "é", "x" * 2000, value + "?")))
    else:
        made = draw.choice((0, 1, 2, 4, value + 1, max(value - 1, 0), (1 << 62) - 1, 1 << 62, (1 << 63) - 1))
        with contextlib.suppress(ValueError):  # more than the field's bits
            setattr(message, field.name, bool(made) if isinstance(value, bool) else made)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
