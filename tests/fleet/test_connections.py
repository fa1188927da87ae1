"""Whoever holds connections without being a robot keeps no robot out, and costs few files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

import grpc
import pytest

from tests.fleet.fleets import Hand, MemoryPolicies, MemorySpool, wait_until
from vla_rl.contract.errors import UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet import transport
from vla_rl.fleet.protocol import write_records
from vla_rl.fleet.transport import most_connections, peer_of

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # HTTP/2: the handshake is over


def spool_of(count, robot="arm-1"):
    spool = MemorySpool(robot)
    spool.put(count)
    return spool


def strangers(port: int, count: int, held: ExitStack) -> list[socket.socket]:
    made = []
    for _ in range(count):
        with suppress(OSError):  # those that are too many are ended at once
            made.append(held.enter_context(socket.create_connection(("127.0.0.1", port), 5)))
            made[-1].sendall(GREETING)
            made[-1].setblocking(False)
    return made


def is_open(sock: socket.socket) -> bool:
    try:
        while data := sock.recv(1 << 16):
            assert data
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def test_strangers_give_way_and_a_robot_that_is_here_stays(serve, monkeypatch):
    monkeypatch.setattr(transport, "HANDSHAKE_S", 1e9)
    given_back: list[bool] = []
    monkeypatch.setattr(transport, "give_back", lambda: given_back.append(True))
    server, spool = serve(max_robots=4), spool_of(2)
    with ExitStack() as held, Hand(server.port) as robot:
        robot.greet(spool)
        silent = strangers(server.port, 120, held)
        wait_until(lambda: sum(map(is_open, silent)) <= 32)
        wait_until(lambda: given_back)
        with Hand(server.port) as newcomer:
            newcomer.greet(spool_of(1, "arm-2"))
        robot.send(write_records(spool.records))
        assert robot.next("ack").durable_seq == 1


def test_streams_on_which_nobody_introduces_himself_give_way(serve, monkeypatch):
    monkeypatch.setattr(transport, "_OF_ADDRESS", 1000)
    monkeypatch.setattr(transport, "HANDSHAKE_S", 1e9)
    server = serve(max_robots=2, silence_s=3600.0)

    def welcome() -> bool:
        with Hand(server.port) as newcomer, suppress(grpc.RpcError):
            newcomer.greet(spool_of(1))
            return True
        return False

    with ExitStack() as held:
        for _ in range(100):  # more than there are threads for
            held.enter_context(Hand(server.port))
        wait_until(welcome)


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:10.0.0.7:5512", ("10.0.0.7", 5512)),
        ("ipv6:%5B::1%5D:77", ("::1", 77)),
        ("ipv6:[::ffff:10.0.0.7]:5", ("10.0.0.7", 5)),
        ("unix:/tmp/x", ("", 0)),
    ],
)
def test_a_peer_is_read_from_grpcs_words(text, peer):
    assert peer_of(text) == peer


def test_too_few_files_are_one_sentence_and_the_limit_is_raised(monkeypatch):
    limits = [(1024, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, to: limits.append(to))
    assert most_connections(256) == 256 + 512
    limits.append((256, 1024))
    assert most_connections(256) == 256 + 512 and limits[-1] == (960, 1024)
    limits.append((511, 511))
    with pytest.raises(UserError, match="may open 511 files, too few for 256 robots"):
        most_connections(256)
    limits.append((512, 512))
    assert most_connections(256) == 256 + 64


class Reading:
    """What gRPC says of a download that a robot has not read to its end."""

    def __init__(self, peer: str) -> None:
        self._peer, self.ends = peer, list[Callable[[], None]]()

    def peer(self) -> str:
        return self._peer

    def add_callback(self, done: Callable[[], None]) -> bool:
        self.ends.append(done)
        return True

    def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        raise UserError(f"{code.name}: {sentence}")


def test_a_robot_downloads_so_many_pieces_at_once_and_no_more():
    policies = MemoryPolicies()
    asked = pb.ChunkRequest(sha256=policies.publish(b"abc"), offset=0, count=3).SerializeToString()
    served = transport.Downloads(policies, lambda context: context.peer().split(":")[1])
    running = [Reading("ipv4:192.0.2.7:1") for _ in range(transport._AT_ONCE)]
    for one in running:
        assert served._chunk(asked, one)
    with pytest.raises(UserError, match=f"RESOURCE_EXHAUSTED: a robot may download {transport._AT_ONCE} pieces"):
        served._chunk(asked, Reading("ipv4:192.0.2.7:1"))
    assert served._chunk(asked, Reading("ipv4:192.0.2.8:1")), "another robot"
    running[0].ends[0]()
    assert served._chunk(asked, Reading("ipv4:192.0.2.7:1"))
