"""A client of openpi's policy servers, written from the description of their protocol and without our code.

The server speaks first: its metadata.  Then every request is one binary message and has one answer.  A message is a
msgpack map; an array in it is the map {b"__ndarray__": true, b"data": bytes, b"dtype": numpy's short name, b"shape"}.
A text is the server's complaint.  The API key travels in the upgrade request: "Authorization: Api-Key KEY".
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgpack
import numpy as np
import websockets.sync.client

from sims.toy import counting
from tests.patience import PATIENCE


def packed(message: Any) -> bytes:
    return msgpack.packb(message, default=_array)


def _array(array: np.ndarray) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def _value(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" in found:
        return np.frombuffer(found[b"data"], found[b"dtype"]).reshape(found[b"shape"])
    return found


class OpenpiStyle:
    """One connection; ``key`` is the API key, ``options`` those of the websockets package."""

    def __init__(self, url: str, key: str = "", **options: Any) -> None:
        headers = {"Authorization": f"Api-Key {key}"} if key else None
        connecting = websockets.sync.client.connect(
            url, compression=None, max_size=None, additional_headers=headers, open_timeout=PATIENCE, **options
        )
        self._opened = ExitStack()
        self.socket = self._opened.enter_context(connecting)
        self.metadata = self.read()

    def read(self) -> Any:
        answer = self.socket.recv(PATIENCE)
        assert isinstance(answer, bytes), answer
        return msgpack.unpackb(answer, object_hook=_value)

    def ask(self, request: dict[str, Any]) -> None:
        self.socket.send(packed(request))

    def infer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.ask(request)
        return self.read()

    def complaint(self, message: bytes | str) -> str:
        """The text that answers ``message``."""
        self.socket.send(message)
        answer = self.socket.recv(PATIENCE)
        assert isinstance(answer, str), answer
        return answer

    def __enter__(self) -> OpenpiStyle:
        return self

    def __exit__(self, *ended: object) -> None:
        self._opened.close()


def asked(seed: int = 5, **changes: Any) -> dict[str, Any]:
    """A request in the keys of openpi's LIBERO clients that the counting environment's policies understand."""
    spec = counting.spec()
    request = {
        "observation/image": np.zeros(spec.images["audit"].shape, np.uint8),
        "observation/state": np.array([seed, 0, 9, 0], np.float64),
        "prompt": spec.tasks[seed % 2],
        **{name.replace("_", "/", 1): item for name, item in changes.items() if "_" in name},
        **{name: item for name, item in changes.items() if "_" not in name},
    }
    return {name: item for name, item in request.items() if item is not None}
