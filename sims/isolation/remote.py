"""A worker on another machine: the messages of a local one over a socket, with the arrays inside."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sims.isolation.channel import Arrays, InMessages
from sims.isolation.links import read_answer
from sims.isolation.security import Security
from vla_rl.contract.child import ChildError
from vla_rl.contract.errors import UserError
from vla_rl.contract.wire import SocketStream, handshake, read_message, write_message

_PAUSE = 0.5  # seconds between two attempts to connect


class RemoteWorker:
    """One connection to ``vla-rl sims serve``, which starts a worker process for it (``Link``)."""

    def __init__(
        self, address: tuple[str, int], security: Security, patience: float, reached: Callable[[], None]
    ) -> None:
        """Connects with the first request, trying again for ``patience`` seconds while nobody listens.

        ``reached`` is called when a server has answered.
        """
        self.address, self._security, self._patience, self._reached = address, security, patience, reached
        self._stream: SocketStream | None = None
        self._channel, self._words = InMessages(), ""
        self._failure = ""  # why it is of no more use: another connection would be another worker

    @property
    def name(self) -> str:
        return f"the worker at {self.address[0]}:{self.address[1]}"

    def send(self, request: Mapping[str, Any], arrays: Mapping[str, np.ndarray], deadline: float) -> None:
        with self._failing():
            self._require_sound()
            stream = self._stream or self._connect(deadline)
            stream.deadline = deadline
            write_message(stream, {**request, "arrays": self._channel.put(arrays)})

    def receive(self, deadline: float) -> tuple[dict[str, Any], Arrays]:
        with self._failing():
            self._require_sound()
            assert self._stream is not None
            self._stream.deadline = deadline
            answer = read_message(self._stream)
        if isinstance(answer, dict) and "fate" in answer:
            self._words = str(answer.get("last_words", ""))
            raise ChildError(str(answer["fate"]))
        return read_answer(answer, self._channel.get)

    def last_words(self) -> str:
        return self._words

    def kill(self) -> None:
        """Close the connection: the server ends its worker then, whatever that does."""
        self._failure = self._failure or "was closed"
        if self._stream is not None:
            self._stream.close()

    def close(self) -> None:
        self.kill()

    def _require_sound(self) -> None:
        if self._failure:
            raise ChildError(self._failure)

    def _connect(self, deadline: float) -> SocketStream:
        host, port = self.address
        end = min(deadline, time.monotonic() + self._patience)
        while True:
            try:
                plain = socket.create_connection((host, port), max(1e-3, deadline - time.monotonic()))
                break
            except OSError:
                if time.monotonic() + _PAUSE > end:
                    raise
            time.sleep(_PAUSE)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream = stream = SocketStream(self._security.connect(plain, host))
        except BaseException:
            plain.close()
            raise
        stream.deadline = deadline
        stream.write(self._security.digest())
        handshake(stream, stream, "environment")
        self._reached()
        return stream

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            self._failure = "did not answer in time"
            raise ChildError(self._failure) from error
        except (EOFError, OSError) as error:
            reason = str(error) or "it closed the connection"
            self._failure = f"cannot be reached ({reason}; does vla-rl sims serve run there, with this key?)"
            raise ChildError(self._failure) from error


class RemoteStart:
    """Starts workers at ``address``, "host:port"; raises UserError for an address that is none or not secured."""

    def __init__(self, address: str, security: Security, patience: float) -> None:
        """``patience``: seconds to wait for a server that was there and is not any more."""
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdigit():
            raise UserError(f"{address!r} is no address, so nothing can be connected; write it as host:port.")
        security.require_for(host)
        self._address, self._security, self._patience = (host, int(port)), security, patience
        self._reached = False

    def __call__(self) -> RemoteWorker:
        return RemoteWorker(self._address, self._security, self._patience if self._reached else 0.0, self._note)

    def _note(self) -> None:
        self._reached = True
