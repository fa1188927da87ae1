"""Messages to and from other processes for a loop that never waits, whatever they do."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Any

from vla_rl.contract.errors import ContractError
from vla_rl.contract.wire import Pieces, framed, greeted, greeting

_AT_ONCE = 1 << 18  # bytes that are read from a peer in one call
_ROOM = 1 << 25  # bytes that wait for a peer: minutes of records
_LARGEST = 1 << 24  # bytes in one message of a peer


class Inbox:
    """What has arrived from a peer.  The first message is its greeting."""

    def __init__(self, end: int, name: str) -> None:
        """``end`` is the descriptor that is read, ``name`` that of this side."""
        os.set_blocking(end, False)
        self._end, self._name, self._greeted = end, name, False
        self._pieces = Pieces(_LARGEST)
        self.gone = ""  # why nothing comes any more

    def fileno(self) -> int:
        """The descriptor, for those who wait."""
        return self._end

    def poll(self) -> list[Any]:
        """The messages that are there, in their order; none for ever once the peer is gone or speaks nonsense."""
        if self.gone:
            return []
        try:
            piece = os.read(self._end, _AT_ONCE)
        except BlockingIOError:
            return []
        except OSError as error:
            self.gone = str(error)
            return []
        if not piece:
            self.gone = "it has ended"
            return []
        try:
            messages = self._pieces.add(piece)
            if messages and not self._greeted:
                greeted(messages.pop(0), self._name)
                self._greeted = True
        except ContractError as error:
            self.gone = str(error)
            return []
        return messages


class Outbox:
    """What waits to be read by a peer.  When it hangs for long, the oldest whole messages are dropped and counted."""

    def __init__(self, end: int, name: str, room: int = _ROOM) -> None:
        """``end`` is the descriptor that is written, ``name`` that of this side, ``room`` how many bytes may wait."""
        os.set_blocking(end, False)
        self._end, self._room = end, room
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._partial = b""  # the rest of a message of which the peer has a part
        self.dropped = 0
        self.gone = False
        self.put(greeting(name))

    @property
    def waiting(self) -> bool:
        """Whether the peer has not got everything."""
        return bool(self._partial or self._waiting)

    def put(self, message: Any) -> None:
        """Send ``message`` when the peer has room for it."""
        data = framed(message)
        self._waiting.append(data)
        self._bytes += len(data)
        while self._bytes > self._room or (self.gone and self._waiting):
            self._bytes -= len(self._waiting.popleft())
            self.dropped += 1

    def flush(self) -> None:
        """Pass on what the peer has room for."""
        while not self.gone and self.waiting:
            if not self._partial:
                self._partial = self._waiting.popleft()
                self._bytes -= len(self._partial)
            written = 0
            with contextlib.suppress(BlockingIOError):
                try:
                    written = os.write(self._end, self._partial)
                except BrokenPipeError:
                    self.gone = True
            if not written:
                return
            self._partial = self._partial[written:]
