"""What a robot says of itself before its first episode: a record of kind "event" with the spec of what it sends."""

from __future__ import annotations

from vla_rl.contract import wire
from vla_rl.contract.errors import ContractError
from vla_rl.contract.spec import EnvSpec

_NAME = "introduction"


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
    return EnvSpec.from_json(message["spec"])
