"""A connection refuses what is oversized, malformed or slow, on either side, and says so."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import websockets.sync.client
from websockets.exceptions import InvalidStatus

from tests.patience import PATIENCE
from tests.serving.served import PATIENT
from vla_rl.contract.errors import UserError
from vla_rl.serving import websocket
from vla_rl.serving.websocket import ClosedError, Connection, DisconnectedError, Limits, connect

SLOW = 0.3  # seconds: longer than what is sent at once takes, shorter than anybody is patient
SOON = 60.0  # seconds in which the other limits are noticed, also where this process is held up
IDLE = 120.0  # seconds that a server waits for the next message, so that a test that fails ends
OPENING = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)
MASK = b"\0\0\0\0"


@pytest.fixture(autouse=True)
def short_farewells(monkeypatch):
    """The other sides of these tests do not read why they were refused."""
    monkeypatch.setattr(websocket, "_LINGER", 0.1)


class Server:
    """Serves one connection in a thread; ``ended`` is what ended it."""

    def __init__(self, limits: Limits, serve: Callable[[Connection], None]) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.ended: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(limits, serve), daemon=True)
        self.thread.start()

    def _run(self, limits: Limits, serve: Callable[[Connection], None]) -> None:
        connection = None
        try:
            connection = Connection.accept(self.socket.accept()[0], "somebody", limits, {"/health": "well\n"})
            if connection is not None:
                serve(connection)
        except UserError as error:
            self.ended = error
        finally:
            if connection is not None:
                connection.close()

    def join(self, timeout: float = PATIENCE) -> Exception | None:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "it goes on waiting"
        self.socket.close()
        return self.ended


@pytest.fixture
def server():
    started = []

    def start(limits: Limits | None = None, serve: Callable[[Connection], None] | None = None) -> Server:
        limits = limits or PATIENT
        started.append(Server(replace(limits, idle_s=min(limits.idle_s, IDLE)), serve or echo))
        return started[-1]

    yield start
    for one in started:
        one.join()


def echo(connection: Connection) -> None:
    while True:
        message = connection.receive()
        connection.send(message if isinstance(message, bytes) else b"text " + message.encode())


def raw(server: Server, early: bytes = b"") -> socket.socket:
    """A connection whose opening was answered, byte by byte ours from then on; ``early`` came with the opening."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    sock.sendall(OPENING + b"\r\n" + early)
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += sock.recv(1)
    assert answer.startswith(b"HTTP/1.1 101"), answer
    return sock


def frame(opcode: int, data: bytes, fin: bool = True, announced: int | None = None) -> bytes:
    """A client's frame, masked by zeros, which may announce another length than it has."""
    size = len(data) if announced is None else announced
    head = bytes([(0x80 if fin else 0) | opcode])
    if size < 126:
        return head + bytes([0x80 | size]) + MASK + data
    if size < 1 << 16:
        return head + bytes([0x80 | 126]) + struct.pack(">H", size) + MASK + data
    return head + bytes([0x80 | 127]) + struct.pack(">Q", size) + MASK + data


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += sock.recv(count - len(data)) or pytest.fail(f"it ended after {data!r}")
    return data


def refusal(sock: socket.socket) -> tuple[int, str]:
    """Code and reason of the close frame with which the server ends."""
    with sock:
        data = b""
        while piece := sock.recv(4096):
            data += piece
    assert data[0] == 0x88 and data[1] == len(data) - 2, data
    return struct.unpack(">H", data[2:4])[0], data[4:].decode()


def url(server: Server) -> str:
    return f"ws://127.0.0.1:{server.port}"


@pytest.mark.parametrize("size", [0, 1, 125, 126, 70_000, 3_000_000])
def test_messages_of_any_size_go_through_and_come_back(server, size):
    connection = connect(url(server()), PATIENT)
    data = bytes(i % 251 for i in range(size))
    for _ in range(2):
        connection.send(data)
        assert connection.receive() == data
    connection.close()
    connection.close()


def test_another_implementation_understands_it_in_fragments_and_between_pings(server):
    started = server()
    with websockets.sync.client.connect(url(started), compression=None) as client:
        client.send([b"a", b"", b"bc"])
        assert client.ping().wait(PATIENCE) and client.recv() == b"abc"
        client.send("words")
        assert client.recv() == b"text words"
    assert isinstance(started.join(), ClosedError)


def test_several_messages_that_arrive_at_once_are_kept_apart(server):
    with raw(server(), early=frame(9, b"a") + frame(2, b"zero")) as sock:
        sock.sendall(frame(2, b"one") + frame(9, b"ping") + frame(2, b"two"))
        assert exactly(sock, 25) == b"\x8a\x01a\x82\x04zero\x8a\x04ping\x82\x03one\x82\x03two"


def test_what_comes_while_a_server_computes_stays_in_the_connection(server):
    """Whoever sends on and on is held up by TCP, and takes no memory of the server."""
    held = []

    def computing(connection: Connection) -> None:
        while not connection._events:
            connection.attend()
        for _ in range(100):
            connection.attend()
        held.append(len(connection._events))

    started = server(serve=computing)
    with raw(started) as sock:
        sock.sendall(20 * frame(2, b"x" * 60_000))
        started.join()
    assert held[0] <= 2


@pytest.mark.parametrize(
    ("bytes_sent", "code"),
    [
        (b"\x82\x01x", 1002),  # without a mask
        (frame(3, b"x"), 1002),  # an opcode that does not exist
        (b"\xc2\x81" + MASK + b"x", 1002),  # compressed, which was not agreed on
        (frame(0, b"x"), 1002),  # goes on with nothing
        (frame(1, b"\xff"), 1007),  # a text that is none
        (frame(2, b"x", announced=1 << 40), 1009),  # before it is read
        (frame(2, b"x" * 600, fin=False) + frame(0, b"x" * 600), 1009),  # together
    ],
)
def test_malformed_and_oversized_frames_are_refused(server, bytes_sent, code):
    started = server(replace(PATIENT, message_bytes=1000))
    sock = raw(started)
    sock.sendall(bytes_sent)
    assert refusal(sock)[0] == code
    assert isinstance(started.join(), DisconnectedError)


def test_what_is_too_large_is_not_sent_either(server):
    connection = connect(url(server()), replace(PATIENT, message_bytes=100))
    with pytest.raises(UserError, match="has 101 bytes, more than 100, so it is not sent"):
        connection.send(b"x" * 101)
    connection.close()


def trickle(sock: socket.socket, data: bytes, pause: float) -> None:
    """Sends byte by byte until the other side has had enough."""
    try:
        for i in range(len(data)):
            sock.sendall(data[i : i + 1])
            time.sleep(pause)
    except OSError:
        pass


@pytest.mark.parametrize(
    "slow",
    [frame(2, b"x" * 100_000), frame(2, b"x", fin=False) + frame(0, b"y" * 100_000)],
    ids=["a frame", "the second fragment"],
)
def test_a_slow_message_is_refused_however_steadily_it_drips(server, slow):
    started = server(replace(PATIENT, message_s=SLOW))
    sock = raw(started)
    dripping = threading.Thread(target=trickle, args=(sock, slow, 0.001), daemon=True)
    dripping.start()
    with sock:
        assert "was too slow with a message" in str(started.join(SOON))
    dripping.join(PATIENCE)


@pytest.mark.parametrize("with_opening", [False, True])
@pytest.mark.parametrize(
    "bytes_sent",
    [frame(2, b"x", announced=70_000), frame(2, b"whole") + frame(2, b"x", fin=False), frame(9, b"") + b"\x82"],
)
def test_a_message_has_begun_with_its_first_byte_whatever_came_with_it(server, bytes_sent, with_opening):
    started = server(replace(PATIENT, message_s=SLOW))
    with socket.create_connection(("127.0.0.1", started.port), timeout=PATIENCE) as sock:
        for piece in [OPENING + b"\r\n" + bytes_sent] if with_opening else [OPENING + b"\r\n", bytes_sent]:
            sock.sendall(piece)
        assert "was too slow with a message" in str(started.join(SOON))


def test_pings_do_not_count_as_a_message_that_has_begun(server):
    with raw(server(replace(PATIENT, message_s=SLOW))) as sock:
        sock.sendall(frame(9, b""))
        time.sleep(2 * SLOW)
        sock.sendall(frame(2, b"late"))
        assert exactly(sock, 8) == b"\x8a\x00\x82\x04late"


def test_a_connection_that_says_nothing_is_ended(server):
    started = server(replace(PATIENT, idle_s=SLOW))
    sock = raw(started)
    assert refusal(sock) == (1008, "sent nothing for too long")
    assert "sent nothing for too long" in str(started.join())


def test_an_opening_that_does_not_end_is_ended(server):
    started = server(replace(PATIENT, opening_s=SLOW))
    with socket.create_connection(("127.0.0.1", started.port), timeout=PATIENCE) as sock:
        trickle(sock, OPENING + b"X-Long: " + b"x" * 2000, 0.001)
    assert isinstance(started.join(), DisconnectedError)


def test_who_does_not_read_is_not_waited_for(server):
    started = server(replace(PATIENT, message_s=SLOW), lambda connection: connection.send(b"x" * 50_000_000))
    with raw(started):
        assert "was too slow to take a message" in str(started.join(SOON))


def test_a_web_page_is_refused(server):
    started = server()
    with pytest.raises(InvalidStatus) as refused:
        websockets.sync.client.connect(url(started), origin="http://somewhere.example")
    assert refused.value.response.status_code == 403


def test_no_compression_is_agreed_on(server):
    with websockets.sync.client.connect(url(server())) as client:
        assert not client.protocol.extensions


def test_a_plain_page_is_answered_and_other_requests_are_not(server):
    for path, status, body in (("/health", b"200", b"well\n"), ("/other", b"426", None)):
        started = server()
        with socket.create_connection(("127.0.0.1", started.port), timeout=PATIENCE) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = b"".join(iter(lambda sock=sock: sock.recv(4096), b""))
        assert answer.split()[1] == status and (body is None or answer.endswith(body))


def test_what_speaks_no_http_is_refused(server):
    started = server()
    with socket.create_connection(("127.0.0.1", started.port), timeout=PATIENCE) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert b"101" not in sock.recv(4096)[:20]
    assert isinstance(started.join(), DisconnectedError)
    started = server()
    socket.create_connection(("127.0.0.1", started.port), timeout=PATIENCE).close()
    assert isinstance(started.join(), DisconnectedError)


# -- as the client -----------------------------------------------------------------------------------------------------


def test_nobody_there_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(UserError, match=f"no policy server answers at ws://127.0.0.1:{port} .*start it, or correct"):
        connect(f"ws://127.0.0.1:{port}", PATIENT)
    with pytest.raises(UserError, match="is no address of a server"):
        connect("http://127.0.0.1", PATIENT)


def test_a_server_that_does_not_answer_the_opening_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(DisconnectedError, match="was too slow"):
        connect(f"ws://127.0.0.1:{listening.getsockname()[1]}", replace(PATIENT, opening_s=SLOW))


def test_a_server_that_is_no_websocket_is_said(server):
    started = server()
    with pytest.raises(DisconnectedError, match=r"refused the connection \(200|did not open a WebSocket"):
        connect(f"{url(started)}/health", PATIENT)


def test_a_client_waits_for_an_answer_as_long_as_it_says(server):
    connection = connect(url(server()), PATIENT)
    with pytest.raises(DisconnectedError, match="sent nothing for too long"):
        connection.receive(SLOW)
    with pytest.raises(DisconnectedError):
        connection.send(b"x")


def test_a_server_that_hangs_up_or_vanishes_is_said(server):
    for leave, in_order in ((Connection.close, True), (lambda connection: connection._socket.close(), False)):
        connection = connect(url(server(serve=leave)), PATIENT)
        with pytest.raises(DisconnectedError) as lost:
            connection.receive()
        assert isinstance(lost.value, ClosedError) == in_order


def test_who_has_said_goodbye_has_left_although_our_answer_reaches_nobody(server, monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    def leaving(connection):
        connection.receive()
        connection.close()

    connection = connect(url(server(serve=leaving)), PATIENT)
    connection.send(b"leave")
    monkeypatch.setattr(connection, "_push", broken)
    with pytest.raises(ClosedError, match="closed the connection"):
        connection.receive()


def test_what_is_taken_at_once_is_in_time_however_late_it_is_sent(server):
    connection = connect(url(server()), PATIENT)
    connection.limits = replace(PATIENT, message_s=1e-9)
    connection.send(b"late")
    assert connection.receive(PATIENCE) == b"late"
    connection.close()


def test_limits_without_meaning_are_refused():
    for wrong in ({"message_bytes": 0}, {"message_s": -1.0}, {"idle_s": float("nan")}):
        with pytest.raises(UserError, match="has no meaning"):
            Limits(**wrong)
