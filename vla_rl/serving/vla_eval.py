"""The messages of the vla-eval harness: benchmarks on one side, model servers on the other.

Source: the package ``vla-eval`` 0.8.0 (github.com/allenai/vla-evaluation-harness), ``protocol/messages.py``,
``protocol/numpy_codec.py``, ``protocol/image_codec.py``, ``types.py``, ``connection.py``.  A message is a msgpack map
``{type, payload, seq, timestamp}``.  Arrays are the map ``{"__ndarray__": True, data, dtype, shape}`` with bool,
integer and float dtypes only, pictures ``{"__image__": True, format, data, shape}`` as PNG (the default), JPEG or raw.

The benchmark says HELLO and gets HELLO; EPISODE_START and EPISODE_END have no answer; every OBSERVATION gets one ACTION
or ERROR with its ``seq``.  A server answers with one action, and keeps the rest of a chunk for the next observations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from vla_rl import __version__
from vla_rl.contract.errors import ContractError, did_you_mean
from vla_rl.serving import arrays
from vla_rl.serving.observation import SingleObservation

PROTOCOL_VERSION = 1


class Kind(StrEnum):
    """What a message is."""

    HELLO = "hello"
    OBSERVATION = "observation"
    ACTION = "action"
    EPISODE_START = "episode_start"
    EPISODE_END = "episode_end"
    ERROR = "error"


@dataclass(frozen=True)
class Message:
    """One message; an answer has the ``seq`` of the message that it answers."""

    kind: Kind
    payload: Mapping[str, Any]
    seq: int


def pack(message: Message) -> bytes:
    """One message as bytes; raises ContractError for what the other side could not read."""
    fields = {"type": message.kind.value, "payload": message.payload, "seq": message.seq, "timestamp": time.time()}
    return arrays.pack(fields, _encode)


def unpack(data: bytes | str) -> Message:
    """The message in ``data``; raises ContractError for everything else."""
    if isinstance(data, str):
        raise ContractError("a message is a text, so it is refused; the harness's messages are binary.")
    fields = arrays.unpack(data, _decode)
    if not isinstance(fields, dict) or not {"type", "payload", "seq", "timestamp"} <= fields.keys():
        raise ContractError(
            "a message lacks type, payload, seq or timestamp, so it is refused; check that the other side speaks the "
            "vla-eval harness's protocol."
        )
    kind, payload, seq, sent = (fields[name] for name in ("type", "payload", "seq", "timestamp"))
    kinds = [item.value for item in Kind]
    if not isinstance(kind, str) or kind not in kinds:
        raise ContractError(
            f"a message has the type {arrays.shown(kind)}, so it is refused; {did_you_mean(arrays.shown(kind), kinds)}"
        )
    if not isinstance(payload, dict) or not all(isinstance(key, str) for key in payload):
        raise ContractError(f"the payload of {kind!r} is no map with text keys, so it is refused; send a map.")
    if type(seq) is not int or not 0 <= seq < 1 << 63:
        raise ContractError(
            f"the seq of {kind!r} is {arrays.shown(seq)}, so no answer could name it; send a number from 0."
        )
    if type(sent) not in (int, float):
        raise ContractError(f"the timestamp of {kind!r} is {arrays.shown(sent)}, so it is refused; send seconds.")
    return Message(Kind(kind), payload, seq)


def hello(**extra: Any) -> dict[str, Any]:
    """The payload with which either side introduces itself."""
    return {"harness_version": f"vla-rl {__version__}", "protocol_version": PROTOCOL_VERSION, **extra}


def check_hello(payload: Mapping[str, Any]) -> None:
    """Raise ContractError when the other side speaks another version of the protocol."""
    version = payload.get("protocol_version")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ContractError(
            f"the other side speaks version {arrays.shown(version)} of the vla-eval protocol but this "
            f"is {PROTOCOL_VERSION}, so data would be misread; use a vla-eval that speaks version {PROTOCOL_VERSION}."
        )


def observation_payload(obs: SingleObservation) -> dict[str, Any]:
    """``obs`` in the keys of the harness's benchmarks, which write "states" where its documentation has "state"."""
    state = {"states": obs.state, "state": obs.state}
    return {"images": dict(obs.images), "task_description": obs.instruction, **state}


def read_observation(payload: Mapping[str, Any]) -> SingleObservation:
    """The observation in those keys, with "states" or "state"; raises ContractError for other types."""
    images, state = payload.get("images", {}), payload.get("states", payload.get("state"))
    words = payload.get("task_description")
    if not isinstance(images, dict) or not isinstance(words, str) or not isinstance(state, np.ndarray):
        found = ", ".join(f"{key}: {type(item).__name__}" for key, item in payload.items())
        raise ContractError(
            f"an observation holds {found:.200}, so the policy cannot act; send images (a map of arrays), states (an "
            "array; most benchmarks have a parameter send_state) and task_description (a text)."
        )
    return SingleObservation(images, state, words)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        dtype, shape, data = arrays.plain(value)
        return {"__ndarray__": True, "data": data, "dtype": dtype, "shape": shape}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode(item: dict[Any, Any]) -> Any:
    if "__image__" in item and item.get("format") != "raw":
        return arrays.read_image(item.get("data"), item.get("shape"))
    if "__image__" in item or "__ndarray__" in item:
        return arrays.read_array(item.get("dtype"), item.get("shape"), item.get("data"))
    return item
