"""Byte streams with a deadline: reading and writing end in time, whatever the process at the other end does."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import select
import socket
import time
from typing import Protocol

_READ_BYTES = 1 << 20


class Reader(Protocol):
    """What messages are read from."""

    def read(self, size: int, /) -> bytes:
        """At least one and at most ``size`` bytes; none at the end of the stream."""


class Writer(Protocol):
    """What messages are written to."""

    def write(self, data: bytes, /) -> object:
        """Take ``data``, which may wait for :meth:`flush`."""

    def flush(self) -> object:
        """Pass everything on."""


class PipeStream:
    """A pair of pipes to another process, a ``Reader`` and a ``Writer``.

    ``deadline`` (``time.monotonic``, None: never) holds for every call: TimeoutError is raised when it passes.  Bytes
    that are there already are read after the deadline, too.
    """

    def __init__(self, reader: int, writer: int) -> None:
        """``reader`` and ``writer`` are file descriptors, which belong to the stream from now on."""
        self._reader, self._writer = reader, writer
        self.closed, self.deadline = False, None  # type: bool, float | None
        self._waiting: list[bytes] = []
        for end in (reader, writer):
            widen(end)
            os.set_blocking(end, False)

    def fileno(self) -> int:
        """The descriptor that is read."""
        return self._reader

    def read(self, size: int, /) -> bytes:
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._reader, min(size, _READ_BYTES))
            self._wait(self._reader, select.POLLIN)

    def write(self, data: bytes, /) -> None:
        self._waiting.append(data)

    def flush(self) -> None:
        """Pass everything on; raises BrokenPipeError when nobody reads any more."""
        data, self._waiting = memoryview(b"".join(self._waiting)), []
        while data:
            written = 0
            with contextlib.suppress(BlockingIOError):
                written = os.write(self._writer, data)
            data = data[written:]
            if data:
                self._wait(self._writer, select.POLLOUT)

    def close(self) -> None:
        """Close both pipes; safe to call twice."""
        if not self.closed:
            self.closed = True
            for end in (self._reader, self._writer):
                os.close(end)

    def _wait(self, end: int, event: int) -> None:
        poll = select.poll()
        poll.register(end, event)
        if not poll.poll(None if self.deadline is None else 1000 * max(0.0, self.deadline - time.monotonic())):
            raise TimeoutError("the deadline has passed")


def widen(end: int) -> None:
    """Let a pipe hold a megabyte, where the system can, so that weights pass with few switches between processes."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # the user's pipes may hold no more
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 1 << 20)


class SocketStream:
    """A connected socket as a ``Reader`` and a ``Writer``, with the deadline of :class:`PipeStream`."""

    def __init__(self, connected: socket.socket) -> None:
        """``connected`` belongs to the stream from now on."""
        self.socket = connected
        self.deadline: float | None = None
        self._waiting: list[bytes] = []

    def read(self, size: int, /) -> bytes:
        self._limit()
        return self.socket.recv(min(size, _READ_BYTES))

    def write(self, data: bytes, /) -> None:
        self._waiting.append(data)

    def flush(self) -> None:
        data, self._waiting = b"".join(self._waiting), []
        self._limit()
        self.socket.sendall(data)

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        with contextlib.suppress(OSError):  # the other side may be gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _limit(self) -> None:
        self.socket.settimeout(None if self.deadline is None else max(1e-3, self.deadline - time.monotonic()))


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine, by its address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
