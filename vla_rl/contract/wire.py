"""Messages between processes and machines: length-prefixed msgpack with numpy arrays, never pickle.

A message is any nesting of dicts with text keys, lists, text, bytes, numbers, booleans, None and numeric numpy arrays.
An array is a msgpack extension with its dtype, shape and little-endian bytes; the received array is writable and owns
its memory.  On a stream, ``MAGIC`` and the length precede a message.  Between processes of one machine, arrays can lie
beside it: ``SharedMemory``.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import math
import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, TypeAlias

import msgpack
import numpy as np

from vla_rl.contract import CONTRACT_VERSION
from vla_rl.contract.errors import ContractError


class Stream:
    """Bytes from and to another process; reading and writing end in time, whatever it does.

    ``deadline`` (``time.monotonic``, None: never) holds for every call: TimeoutError is raised when it passes.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None
        self._waiting: list[bytes] = []

    def read(self, size: int, /) -> bytes:
        """At least one and at most ``size`` bytes; none at the end of the stream."""
        raise NotImplementedError

    def write(self, data: bytes, /) -> None:
        """Take ``data``, which waits for :meth:`flush`."""
        self._waiting.append(data)

    def flush(self) -> None:
        """Pass everything on; raises OSError when nobody reads any more."""
        data, self._waiting = memoryview(b"".join(self._waiting)), []
        self._send(data)

    def _send(self, data: memoryview) -> None:
        raise NotImplementedError


class PipeStream(Stream):
    """A pair of pipes to another process.  Bytes that are there already are read after the deadline, too."""

    def __init__(self, reader: int, writer: int) -> None:
        """``reader`` and ``writer`` are file descriptors, which belong to the stream from now on."""
        super().__init__()
        self._reader, self._writer, self.closed = reader, writer, False
        for end in (reader, writer):
            widen(end)
            os.set_blocking(end, False)

    def fileno(self) -> int:
        return self._reader

    def read(self, size: int, /) -> bytes:
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._reader, min(size, _READ_BYTES))
            self._wait(self._reader, select.POLLIN)

    def _send(self, data: memoryview) -> None:
        while data:
            written = 0
            with contextlib.suppress(BlockingIOError):
                written = os.write(self._writer, data)
            data = data[written:]
            if data:
                self._wait(self._writer, select.POLLOUT)

    def close(self) -> None:
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


class SocketStream(Stream):
    """A connected socket, which belongs to the stream from now on."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__()
        self.socket = connected

    def read(self, size: int, /) -> bytes:
        self._limit()
        return self.socket.recv(min(size, _READ_BYTES))

    def _send(self, data: memoryview) -> None:
        self._limit()
        self.socket.sendall(data)

    def close(self) -> None:
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


MAGIC = b"vla1"
_HEADER = struct.Struct("<4sQ")
_MAX_BYTES = 1 << 31  # bytes in one message
_READ_BYTES = 1 << 20
MOST_OF_GREETING = 1 << 16  # bytes
_ARRAY = 1  # msgpack extension code
_DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)


class CutShortError(ContractError, EOFError):
    """A stream that ended inside a message."""


def pack(value: Any) -> bytes:
    """``value`` as bytes; raises ContractError naming the entry that :func:`unpack` could not restore."""
    try:
        packed: bytes = msgpack.packb(_encode(value, "the message"))
        return packed
    except ContractError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise ContractError(f"a message cannot be written ({error}), so it is not sent; send smaller parts.") from error


def unpack(data: bytes) -> Any:
    """The value that :func:`pack` received (tuples become lists); raises ContractError for other bytes."""
    try:
        value = msgpack.unpackb(data, ext_hook=_decode, object_pairs_hook=_mapping, list_hook=_sequence)
        return _plain(value)
    except ContractError:
        raise
    except (ValueError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise ContractError(
            f"a message of {len(data)} bytes cannot be read ({reason}), so it is dropped; look for a foreign or broken "
            "sender."
        ) from error


def write_message(stream: Stream | IO[bytes], value: Any) -> None:
    """Send ``value`` over ``stream``; nothing is written when it cannot be packed."""
    stream.write(framed(value))
    stream.flush()


def framed(value: Any) -> bytes:
    """The bytes of :func:`write_message`."""
    data = pack(value)
    if len(data) > _MAX_BYTES:
        raise ContractError(
            f"a message has {len(data)} bytes, more than {_MAX_BYTES}, so it is not sent; send smaller parts."
        )
    return _HEADER.pack(MAGIC, len(data)) + data


def read_message(stream: Stream | IO[bytes], max_bytes: int = _MAX_BYTES) -> Any:
    """The next message.

    Raises EOFError when the stream ended before the message (CutShortError: inside it), and ContractError for a
    message that is foreign, broken or announces more than ``max_bytes``, before memory of that size is allocated.
    """
    head = _read(stream, _HEADER.size)
    if not head:
        raise EOFError("the stream ended between two messages")
    size = _announced(head, max_bytes)
    data = _read(stream, size)
    if len(head) < _HEADER.size or len(data) < size:
        raise CutShortError(
            f"the stream ended after {len(head) + len(data)} bytes of a message, so the message is lost; look at why "
            "the sender stopped."
        )
    return unpack(data)


class Pieces:
    """Messages out of the bytes of a stream, in whatever pieces they come: for those who never wait."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes, self._held = max_bytes, bytearray()

    def add(self, piece: bytes) -> list[Any]:
        """The messages that ``piece`` completes; raises what :func:`read_message` raises."""
        self._held += piece
        messages = []
        while len(self._held) >= _HEADER.size:
            end = _HEADER.size + _announced(bytes(self._held[: _HEADER.size]), self._max_bytes)
            if len(self._held) < end:
                break
            messages.append(unpack(bytes(self._held[_HEADER.size : end])))
            del self._held[:end]
        return messages


def _announced(head: bytes, max_bytes: int) -> int:
    """How many bytes follow ``head``, which may be cut short."""
    size: int
    magic, size = _HEADER.unpack(head) if len(head) == _HEADER.size else (head[:4], 0)
    if magic != MAGIC[: len(magic)]:
        raise ContractError(
            f"the stream holds {head!r} where a message should begin, so it cannot be read; look for other "
            "output on it, such as a print."
        )
    if size > max_bytes:
        raise ContractError(
            f"a message announces {size} bytes, more than {max_bytes}, so it is refused; send smaller parts."
        )
    return size


def handshake(reader: Stream | IO[bytes], writer: Stream | IO[bytes], name: str) -> str:
    """Introduce ``name`` and return the other side's name; raises ContractError when it speaks another version.

    Both sides call it, and each one sends before it waits.
    """
    write_message(writer, greeting(name))
    return greeted(read_message(reader, MOST_OF_GREETING), name)


def greeting(name: str) -> dict[str, Any]:
    """The first message of a process called ``name``."""
    return {"contract_version": CONTRACT_VERSION, "name": name}


def greeted(first: Any, name: str) -> str:
    """The other side's name in its first message; raises ContractError for one that is no greeting of this version."""
    if not isinstance(first, dict) or not isinstance(first.get("contract_version"), int):
        raise ContractError(f"{name!r} got no vla-rl greeting, so nothing is exchanged; check which program answers.")
    other, version = str(first.get("name", "the other side")), first["contract_version"]
    if version != CONTRACT_VERSION:
        raise ContractError(
            f"{other!r} speaks contract version {version} but {name!r} speaks {CONTRACT_VERSION}, so data would be "
            "misread; install the same vla-rl on both sides."
        )
    return other


def _read(stream: Stream | IO[bytes], size: int) -> bytes:
    """``size`` bytes, or all before the end; memory grows with the bytes that arrive, not with ``size``."""
    pieces, missing = [], size
    while missing:
        piece = stream.read(min(missing, _READ_BYTES))
        if not piece:
            break
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, _array_bytes(value, where))
    if isinstance(value, np.generic):
        return _encode(value.item(), where)
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    what = "has a key that is not text" if isinstance(value, Mapping) else f"is a {type(value).__name__}"
    raise ContractError(
        f"{where} {what}, so it cannot be sent; send dicts with text keys, lists, text, numbers and numpy arrays."
    )


def _array_bytes(array: np.ndarray, where: str) -> bytes:
    if array.dtype.name not in _DTYPES:
        raise ContractError(f"{where} has dtype {array.dtype}, so it cannot be sent; send one of {', '.join(_DTYPES)}.")
    head: bytes = msgpack.packb([array.dtype.name, list(array.shape)])
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return struct.pack("<H", len(head)) + head + little.tobytes()


def _decode(code: int, data: bytes) -> np.ndarray:
    if code != _ARRAY or len(data) < 2:
        raise ContractError(
            f"a message holds an unknown extension {code}, so it is dropped; update vla-rl on this machine."
        )
    start = 2 + struct.unpack_from("<H", data)[0]
    dtype, shape = _array_head(msgpack.unpackb(data[2:start]))
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ContractError(
            f"a message holds {len(data) - start} bytes as {dtype}{list(shape)}, which does not fit, so it is dropped; "
            "look for a broken sender."
        )
    wire_dtype = np.dtype(np.uint8) if dtype == np.bool_ else dtype.newbyteorder("<")
    return np.frombuffer(data, wire_dtype, offset=start).astype(dtype).reshape(shape)


def _array_head(head: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    match head:
        case [str(dtype), [*shape]] if dtype in _DTYPES and all(type(n) is int and n >= 0 for n in shape):
            return np.dtype(dtype), tuple(shape)
    raise ContractError(f"a message holds an array of {head!r:.80}, so it is dropped; look for a broken sender.")


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    for key, _ in pairs:
        if type(key) is not str:
            raise ContractError(
                f"a message has the key {key!r:.80}, which is not text, so it is dropped; look at the sender."
            )
    return {key: _plain(item) for key, item in pairs}


def _sequence(items: list[Any]) -> list[Any]:
    return [_plain(item) for item in items]


def _plain(item: Any) -> Any:
    if isinstance(item, msgpack.Timestamp):
        raise ContractError("a message holds a msgpack timestamp, so it is dropped; send seconds as a number.")
    return item


# -- arrays between two processes of one machine -----------------------------------------------------------------------

Arrays: TypeAlias = dict[str, np.ndarray]
_ALIGNMENT = 64  # bytes; a cache line
_KINDS = "biuf"  # of the arrays: booleans and numbers


def arrays_in(sent: Any) -> Arrays:
    """``sent`` of a message that holds its arrays itself; raises ContractError for anything else."""
    if not isinstance(sent, dict) or not all(isinstance(array, np.ndarray) for array in sent.values()):
        raise ContractError("a message holds something else than arrays, so it is dropped; look at its sender.")
    return sent


class SharedMemory:
    """Arrays between two processes of one machine: in files in memory that both map and no folder knows.

    Each side writes its own file, or in turn two of them, so that what was received last stays intact while the other
    side writes its next message.  A file grows with the largest message.  The message tells where each array lies.
    """

    def __init__(self, outbox: Sequence[int], inbox: Sequence[int]) -> None:
        """``outbox`` and ``inbox`` are descriptors of files that this side writes and reads; it owns them from now."""
        self._outbox, self._inbox = [_File(file) for file in outbox], [_File(file) for file in inbox]
        self._next = 0

    def put(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """What stands for ``arrays`` in the message; its receiver gives it to :meth:`get`."""
        number, self._next = self._next, (self._next + 1) % len(self._outbox)
        starts, end = {}, 0
        for name, array in arrays.items():
            if array.dtype.kind not in _KINDS:
                raise ContractError(f"{name!r} has dtype {array.dtype}, so it cannot be sent; send numbers.")
            starts[name] = end
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        file = self._outbox[number]
        file.grow(end)
        for name, array in arrays.items():
            file.view(array.dtype, array.shape, starts[name])[...] = array
        return [number, [[name, array.dtype.str, list(array.shape), starts[name]] for name, array in arrays.items()]]

    def get(self, sent: Any) -> Arrays:
        """The arrays that the other side put; raises ContractError for what is none.

        They are overwritten by the other side's second message from now.
        """
        match sent:
            case [int(number), [*table]] if 0 <= number < len(self._inbox):
                return dict(_entry(self._inbox[number], item) for item in table)
        raise ContractError("a message does not say where its arrays lie, so it is dropped; look at its sender.")

    def close(self) -> None:
        for file in (*self._outbox, *self._inbox):
            file.close()


class _File:
    """A file in memory, mapped as far as it is needed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size = 0  # bytes that are mapped

    def grow(self, size: int) -> None:
        """Make room for ``size`` bytes."""
        if size > self._size:
            os.ftruncate(self._descriptor, size)

    def view(self, dtype: np.dtype[Any], shape: Sequence[int], start: int) -> np.ndarray:
        count = math.prod(shape)
        end = start + count * dtype.itemsize
        if not count:
            return np.empty(shape, dtype)
        if end > self._size:
            self._size = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, self._size)  # arrays keep the map before it alive
        if self._map is None or not 0 <= start <= end <= self._size:
            raise ContractError(
                f"an array is said to end at byte {end} of a memory of {self._size}, so it is dropped; look at its "
                "sender."
            )
        return np.frombuffer(self._map, dtype, count, start).reshape(shape)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._map, self._size = -1, None, 0


def _entry(file: _File, item: Any) -> tuple[str, np.ndarray]:
    match item:
        case [str(name), str(dtype), [*shape], int(start)] if (
            dtype[1:2] in _KINDS and dtype[2:].isdigit() and all(type(size) is int and size >= 0 for size in shape)
        ):
            return name, file.view(np.dtype(dtype), shape, start)
    raise ContractError(f"a message describes an array as {item!r}, so it is dropped; look at its sender.")


def memory_file() -> int:
    """The descriptor of an empty file in memory without a name; of one without a name on the disk where that fails."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vla-rl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
