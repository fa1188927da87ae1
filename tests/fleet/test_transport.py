"""Records reach the store once, in order and before they are acknowledged, whatever robots and stores do."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

import grpc
import pytest

from tests.fleet.fleets import Hand, MemoryPolicies, MemorySpool, hello, spool_of
from tests.patience import wait_until
from vla_rl.contract.errors import UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet import transport
from vla_rl.fleet.disk import StoreFullError
from vla_rl.fleet.ledger import GapError
from vla_rl.fleet.link import UnreachableError
from vla_rl.fleet.protocol import Clock, write_records
from vla_rl.fleet.record import Sender
from vla_rl.fleet.session import Batch, Outcome, Session
from vla_rl.fleet.transport import FleetTransport, TransportOptions, most_connections, peer_of

Code = grpc.StatusCode


def test_every_record_arrives_once_in_order_and_as_it_was(serve, link, store):
    spool = spool_of(300)
    spool.put(kind="episode_end", intervened=True, policy_version=7, captured_ns=-5, wall_ns=1 << 60, task="größer")
    state = link(serve().port, spool).status
    wait_until(lambda: state().durable == 300)
    spool.put(5)
    wait_until(lambda: state().durable == 305)
    assert store.records == spool.records
    assert spool.acknowledgements == sorted(spool.acknowledgements) and spool.acknowledgements[-1] == 305


def test_nothing_is_acknowledged_before_it_is_stored(serve, link, store):
    store.slow.clear()
    spool = spool_of(3)
    state = link(serve().port, spool).status
    wait_until(lambda: store.waiting)
    assert state().durable == -1 and not spool.acknowledgements
    store.slow.set()
    wait_until(lambda: spool.acknowledgements == [2])


def test_a_robot_goes_on_behind_what_the_server_has(serve, link, store):
    spool = spool_of(10)
    store.append(spool.records[:6])
    state = link(serve().port, spool).status
    wait_until(lambda: state().durable == 9)
    assert state().sent == 4 and store.records == spool.records


def test_duplicates_are_acknowledged_and_dropped(serve, store):
    spool = spool_of(5)
    with Hand(serve().port) as hand:
        assert hand.greet(spool).durable_seq == -1
        for _ in range(2):
            hand.send(write_records(spool.records))
            assert hand.next("ack").durable_seq == 4
    assert store.records == spool.records


def test_a_conflict_is_an_alarm_and_ends_the_connection(serve, store):
    spool = spool_of(3)
    store.append(spool.records)
    copied = MemorySpool(epoch=spool.epoch)
    copied.put(4, task="another")
    server = serve()
    with Hand(server.port) as hand:
        assert hand.greet(copied).durable_seq == 2
        hand.send(write_records(copied.records[3:]))
        code, sentence = hand.ending()
    assert code is Code.FAILED_PRECONDITION and "two robots of one name" in sentence
    assert len(server.alarms) == 1 and store.records == spool.records


def test_the_newer_connection_of_a_spool_wins(serve, store):
    spool = spool_of(2)
    port = serve().port
    with Hand(port) as older, Hand(port) as newer:
        older.greet(spool)
        newer.greet(spool)
        code, sentence = older.ending()
        assert code is Code.ABORTED and "a newer connection" in sentence
        newer.send(write_records(spool.records))
        assert newer.next("ack").durable_seq == 1


def test_a_robot_replaced_by_another_of_its_name_and_the_server_are_told(serve, link, store):
    server, old, new = serve(), spool_of(3), spool_of(2)
    first = link(server.port, old).status
    wait_until(lambda: first().durable == 2)
    second = link(server.port, new).status
    wait_until(lambda: first().notice and second().notice and second().durable == 1)
    assert "two robots have one name" in server.alarms[0] == first().notice == second().notice
    assert len(store.records) == 5 and set(server._connected) == {old.records[0].sender, new.records[0].sender}


def test_a_replacement_is_told_even_when_the_old_robot_is_away(serve, link, store):
    old, new = spool_of(3), spool_of(1)
    store.append(old.records)
    server = serve()
    state = link(server.port, new).status
    wait_until(lambda: state().durable == 0)
    assert "had another one before" in state().notice and len(server.alarms) == 1


def test_a_spool_that_was_set_back_is_refused(serve, link, store):
    spool = spool_of(5)
    store.append(spool.records)
    spool.records = spool.records[:3]
    server = serve()
    state = link(server.port, spool).status
    wait_until(lambda: "it was set back" in state().trouble)
    assert "it was set back" in server.alarms[0] and not spool.acknowledgements


def test_a_server_with_another_ledger_is_noticed(serve, link, store):
    spool = spool_of(5)
    spool.first_seq = 2
    server = serve()
    state = link(server.port, spool).status
    wait_until(lambda: "its ledger is another one" in state().trouble)
    assert not store.records and not state().connected


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        ({"protocol": 2}, Code.FAILED_PRECONDITION, "speaks version 2"),
        ({"robot": "a b"}, Code.PERMISSION_DENIED, "calls itself"),
        ({"robot": ""}, Code.PERMISSION_DENIED, "calls itself"),
        ({"schema_hash": b""}, Code.INVALID_ARGUMENT, "0 bytes as schema_hash"),
        ({"epoch": b"1"}, Code.INVALID_ARGUMENT, "1 bytes as epoch"),
    ],
)
def test_whoever_does_not_fit_is_refused_in_one_sentence(serve, fields, code, sentence):
    with Hand(serve().port) as hand:
        hand.send(hello(spool_of(1), **fields))
        said = hand.ending()
    assert said[0] is code and sentence in said[1]


def test_a_server_that_is_full_says_so_and_has_room_again(serve, link):
    server = serve(max_robots=1)
    first, second = spool_of(1), spool_of(1, robot="arm-2")
    with Hand(server.port) as hand:
        hand.greet(first)
        state = link(server.port, second).status
        wait_until(lambda: "as many robots as it takes" in state().trouble)
    wait_until(lambda: state().durable == 0)


def test_a_slow_store_slows_robots_and_memory_stays_bounded(serve, link, store):
    store.slow.clear()
    server = serve(memory_mb=1, max_robots=4)
    spools = [spool_of(400, robot=f"arm-{n}", payload=b"x" * 10_000) for n in range(4)]
    states = [link(server.port, spool, batch_kb=64).status for spool in spools]
    # Each has 256 kB of credit and sends messages of at most 6 records of 10 kB.
    wait_until(lambda: all(state().sent == 24 for state in states))
    wait_until(lambda: all(one.session._expected == 24 for one in server._connected.values()))
    for one in server._connected.values():
        assert one.session._in_flight <= 256 << 10
    store.slow.set()
    wait_until(lambda: all(state().durable == 399 for state in states))
    assert len(store.records) == 1600


def test_a_robot_that_ignores_its_credit_is_read_no_further(serve, store):
    store.slow.clear()
    server = serve(memory_mb=1, max_robots=1)
    spool = spool_of(300, payload=b"x" * 100_000)
    with Hand(server.port) as hand:
        hand.greet(spool)
        for record in spool.records:
            hand.send(write_records([record]))
        session = server._connected[spool.records[0].sender].session
        wait_until(lambda: session._in_flight > 1 << 20)
        assert session._in_flight < (1 << 20) + 110_000
        store.slow.set()
        while hand.next("ack").durable_seq < 299:
            assert session._in_flight < (1 << 20) + 110_000
    assert store.records == spool.records


def test_batches_that_wait_share_a_commit(serve, link, store):
    store.slow.clear()
    server = serve()
    spools = [spool_of(1, robot=f"arm-{n}") for n in range(6)]
    states = [link(server.port, spool).status for spool in spools]
    wait_until(lambda: store.waiting)
    wait_until(lambda: len(server._connected) == 6 and all(one.session.busy for one in server._connected.values()))
    store.slow.set()
    wait_until(lambda: all(state().durable == 0 for state in states))
    assert len(store.commits) <= 2 and sum(store.commits) == 6


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreFullError("no room is left; free some."), "no room is left"),
        (ZeroDivisionError("a bug"), "could not store a batch"),
    ],
)
def test_a_store_that_fails_costs_nothing(serve, link, store, error, said):
    store.error = error
    spool = spool_of(4)
    state = link(serve().port, spool).status
    wait_until(lambda: said in state().trouble)
    assert not spool.acknowledgements
    store.error = None
    wait_until(lambda: state().durable == 3)
    assert store.records == spool.records


def test_a_spool_that_fails_does_not_end_the_link(serve, link, store):
    spool = spool_of(4)
    spool.broken = UserError("the spool's disk failed; look at it.")
    state = link(serve().port, spool).status
    wait_until(lambda: "disk failed" in state().trouble)
    spool.broken = None
    wait_until(lambda: state().durable == 3)


def test_policies_are_announced_and_downloaded_in_ranges(serve, link, policies):
    heard = []
    first = policies.publish(b"0123456789" * 300_000)
    state = (robot := link(serve().port, spool_of(1), on_policy=lambda *policy: heard.append(policy))).status
    wait_until(lambda: heard == [(1, "active")])
    second = policies.publish(b"abc", state="canary")
    wait_until(lambda: heard == [(1, "active"), (2, "canary")] and state().policy == (2, "canary"))
    assert robot.manifest(1) == b"manifest of " + first and robot.manifest(2) == b"manifest of " + second
    got = b""
    while piece := robot.chunk(first.hex(), len(got), 1 << 30):
        assert len(piece) <= 1 << 20
        got += piece
    assert got == b"0123456789" * 300_000 and robot.chunk(second.hex(), 1, 1) == b"b"
    with pytest.raises(UnreachableError, match="there is no policy version"):
        robot.manifest(3)
    with pytest.raises(UnreachableError, match="ask by its SHA-256"):
        robot.chunk(b"short".hex(), 0, 1)


def test_without_a_server_downloads_say_so(link):
    robot = link(1, spool_of(1))
    with pytest.raises(UnreachableError, match="is not connected"):
        robot.manifest(1)


def test_a_port_that_is_taken_is_one_sentence(serve, store, policies):
    with pytest.raises(UserError, match="cannot be listened on"):
        FleetTransport(store, policies, TransportOptions(port=serve().port))


def test_a_heartbeat_is_answered(serve):
    with Hand(serve().port) as hand:
        hand.greet(spool_of(1))
        hand.send(pb.FromRobot(heartbeat=pb.Heartbeat(sent_ns=42)))
        assert hand.next("clock").echo_ns == 42


class Server:
    """A session, and the batches that it would store."""

    def __init__(self, records: int = 10, credit: int = 1 << 20) -> None:
        self.spool, self.batches = MemorySpool(), list[Batch]()
        self.spool.put(records)
        sender = Sender(self.spool.robot, self.spool.epoch)
        self.session = Session(sender, -1, self, Clock(), credit, lambda _: None, lambda _: None)  # type: ignore[arg-type]

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)

    def hears(self, first: int, last: int) -> list[int] | None:
        """The records that are stored of ``first`` to ``last``; None where they are refused."""
        count = len(self.batches)
        self.session._take(write_records(self.spool.records[first : last + 1]))
        return [one.seq for one in self.batches[-1].records] if len(self.batches) > count else None

    def asks_for(self) -> int | None:
        """From which record on it wants to hear again, if it has said so since the last time."""
        message = self.session._outbox.pop("nack", None)
        return message.nack.expected if message else None


def test_a_gap_is_told_once_and_the_next_gap_again():
    server = Server()
    assert server.hears(0, 1) == [0, 1] and server.hears(3, 4) is None and server.asks_for() == 2
    assert server.hears(5, 6) is None and server.asks_for() is None, "it was on its way"
    assert server.hears(2, 3) == [2, 3]
    assert server.hears(5, 6) is None and server.asks_for() == 4
    assert server.hears(4, 6) == [4, 5, 6] and server.asks_for() is None


def test_what_comes_twice_sets_nothing_back():
    server = Server()
    assert server.hears(0, 4) == [0, 1, 2, 3, 4] and server.hears(0, 1) == [0, 1]
    assert server.hears(5, 6) == [5, 6] and server.asks_for() is None


def test_a_gap_that_the_store_finds_is_asked_for_from_there():
    server = Server()
    server.hears(0, 6)
    (batch,) = server.batches
    server.session._stored(batch, Outcome(2, GapError(server.spool.records[5], 3)))
    assert not server.session.busy
    assert server.asks_for() == 3 and server.hears(7, 8) is None and server.asks_for() is None
    assert server.hears(3, 8) == [3, 4, 5, 6, 7, 8]


GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # HTTP/2: the handshake is over


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
            newcomer.greet(spool_of(1, robot="arm-2"))
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
        self._peer, self.ends = peer, list[Callable[[Reading], None]]()

    def peer(self) -> str:
        return self._peer

    def add_done_callback(self, done: Callable[[Reading], None]) -> None:
        self.ends.append(done)

    async def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        raise UserError(f"{code.name}: {sentence}")


def test_a_robot_downloads_so_many_pieces_at_once_and_no_more():
    policies = MemoryPolicies()
    asked = pb.ChunkRequest(sha256=policies.publish(b"abc"), offset=0, count=3).SerializeToString()
    served = transport.Downloads(policies, lambda context: context.peer().split(":")[1])
    running = [Reading("ipv4:192.0.2.7:1") for _ in range(transport._AT_ONCE)]
    for one in running:
        assert asyncio.run(served._chunk(asked, one))
    with pytest.raises(UserError, match=f"RESOURCE_EXHAUSTED: a robot may download {transport._AT_ONCE} pieces"):
        asyncio.run(served._chunk(asked, Reading("ipv4:192.0.2.7:1")))
    assert asyncio.run(served._chunk(asked, Reading("ipv4:192.0.2.8:1"))), "another robot"
    running[0].ends[0](running[0])
    assert asyncio.run(served._chunk(asked, Reading("ipv4:192.0.2.7:1")))
