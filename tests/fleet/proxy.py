"""A TCP link with faults: late, slow, cut in the middle of a frame, frozen, or not there at all."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

_LINGER = struct.pack("ii", 1, 0)  # close() sends a reset
_PIECE = 16 << 10


class Proxy:
    """Forwards connections to ``port`` of this machine from its own ``port``.

    ``to`` is where new connections lead.  ``delay_s`` is waited before every piece and
    ``bytes_per_s`` bounds each direction; both may be changed at any time.
    """

    def __init__(self, port: int) -> None:
        self.to, self.delay_s, self.bytes_per_s = port, 0.0, float("inf")
        self.accepted = self.carried = 0  # connections; bytes in both directions
        self._flowing, self._cut_at = threading.Event(), float("inf")
        self._flowing.set()
        self._refusing, self._closed, self._flipping = False, False, False
        self._lock, self._pairs = threading.Lock(), list[tuple[socket.socket, socket.socket]]()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def freeze(self) -> None:
        """Carry nothing and close nothing, as when a laptop is shut: neither end learns of it."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Go on where it froze."""
        self._flowing.set()

    def reset(self) -> None:
        """End every connection with a reset."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for one in pair:
                with suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
                    one.shutdown(socket.SHUT_RD)  # wakes who reads; close() alone does not
                with suppress(OSError):
                    one.close()

    def cut_after(self, count: int) -> None:
        """Reset all connections once ``count`` more bytes have been carried, wherever in a frame that is."""
        self._cut_at = self.carried + count

    def flip(self) -> None:
        """Change one bit of the next piece that is carried."""
        self._flipping = True

    def calm(self) -> None:
        """No faults any more."""
        self.delay_s, self.bytes_per_s, self._cut_at = 0.0, float("inf"), float("inf")
        self._refusing = self._flipping = False
        self.thaw()

    def refuse(self, refusing: bool = True) -> None:
        """Reset new connections at once, or stop doing so."""
        self._refusing = refusing

    def close(self) -> None:
        """End everything; no thread is left."""
        self._closed = True
        self._flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join()

    def _start(self, run, *given) -> None:
        thread = threading.Thread(target=run, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                far = None
            if far is None or self._refusing:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
                for one in (near, far):
                    if one is not None:
                        one.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
            if self._closed:
                self.reset()
            self._start(self._pump, near, far)
            self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # either end may end it at any time
            while piece := source.recv(_PIECE):
                self._flowing.wait()
                if self._flipping:
                    self._flipping = False
                    piece = piece[:-1] + bytes([piece[-1] ^ 1])
                if self.delay_s or self.bytes_per_s < float("inf"):
                    time.sleep(self.delay_s + len(piece) / self.bytes_per_s)
                room = self._cut_at - self.carried
                with self._lock:
                    self.carried += len(piece)
                if len(piece) >= room:
                    self._cut_at = float("inf")
                    sink.sendall(piece[: int(room)])
                    self.reset()
                    return
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
