"""openpi's protocol: a client sends an observation, the server answers with a chunk of actions.

Source: github.com/Physical-Intelligence/openpi, ``packages/openpi-client`` (``msgpack_numpy.py``,
``websocket_client_policy.py``) and ``src/openpi/serving/websocket_policy_server.py``.  The server speaks first, with
its metadata.  Every message is one msgpack map; an array is the map ``{b"__ndarray__": True, b"data", b"dtype",
b"shape"}``, a numpy scalar ``{b"__npgeneric__": True, b"data", b"dtype"}``.  A text instead of bytes is the server's
traceback.  The server keeps no state between requests, so one connection serves all environments, and it draws its own
noise: answers to equal observations differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.serving import arrays
from vla_rl.serving.address import ApiKey
from vla_rl.serving.observation import Request, SingleObservation, chunk_of
from vla_rl.serving.websocket import DisconnectedError, Limits, connect

CAMERAS = ("observation/image", "observation/wrist_image")


def pack(message: Mapping[str, Any]) -> bytes:
    """One message as bytes; raises ContractError for what the other side could not read."""
    return arrays.pack(message, _encode)


def unpack(data: bytes) -> dict[str, Any]:
    """The message in ``data``; raises ContractError for anything but a map with text keys."""
    message = arrays.unpack(data, _decode)
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise ContractError(
            "a message is no map with text keys, so it is refused; check that the server speaks openpi's protocol."
        )
    return message


def libero_request(obs: SingleObservation) -> dict[str, Any]:
    """``obs`` in the keys of openpi's LIBERO policies: one or two cameras, the scene first and then the wrist.

    Raises UserError for another number of cameras: servers of other robots have other keys, which a function of the
    user's own writes (``layout=module:function`` in the address).
    """
    if not 1 <= len(obs.images) <= len(CAMERAS):
        raise UserError(
            f"the environment has {len(obs.images)} cameras, but openpi's LIBERO policies have one or two, so the "
            "server would not understand; add ?layout=module:function to its address."
        )
    cameras = dict(zip(CAMERAS, obs.images.values(), strict=False))
    return {**cameras, "observation/state": obs.state, "prompt": obs.instruction}


class OpenpiClient:
    """Asks one server for the chunks of all environments, one after the other."""

    default_layout = staticmethod(libero_request)

    def __init__(self, url: str, answer_s: float, limits: Limits, key: ApiKey | None = None) -> None:
        self.url, self.answer_s = url, answer_s
        self._connection = connect(url, limits, key)
        self.metadata = self._metadata()

    def new_sessions(self, count: int) -> list[int]:
        """One for all, because the server keeps no state."""
        return [0] * count

    def act(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """The chunk float32 [H,D] for every one of ``requests``."""
        return [self._ask(request.payload) for request in requests]

    def close(self) -> None:
        """End the connection; safe to call twice."""
        self._connection.close()

    def _ask(self, request: Mapping[str, Any]) -> np.ndarray:
        self._connection.send(pack(request))
        answer = unpack(self._bytes("actions"))
        return chunk_of(answer, self.url)

    def _metadata(self) -> dict[str, Any]:
        """What the server says first; raises UserError when that is nothing, or no message of this protocol."""
        try:
            return unpack(self._bytes("its metadata"))
        except (DisconnectedError, ContractError) as error:
            self.close()
            raise UserError(
                f"{self.url} did not introduce itself as openpi's servers do ({error}), so it is not asked to act; "
                f"for a model server of the vla-eval harness, write vla-eval+{self.url}."
            ) from error

    def _bytes(self, what: str) -> bytes:
        message = self._connection.receive(self.answer_s)
        if isinstance(message, bytes):
            return message
        self.close()
        last = message.strip().splitlines()[-1:] or ["an empty text"]
        raise UserError(
            f"the policy server {self.url} failed instead of sending {what} ({last[0]:.200}), so no action was chosen; "
            "look at its own messages."
        )


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        dtype, shape, data = arrays.plain(value)
        return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": arrays.plain(np.asarray(value))[0]}
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode(item: dict[Any, Any]) -> Any:
    if b"__ndarray__" in item:
        return arrays.read_array(item.get(b"dtype"), item.get(b"shape"), item.get(b"data"))
    if b"__npgeneric__" in item:
        value = item.get(b"data")
        if not isinstance(value, bool | int | float):
            raise ContractError(f"a message holds a {type(value).__name__} as a number, so it is refused; send one.")
        return value
    return item
