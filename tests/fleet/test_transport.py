"""Records reach the store once, in order and before they are acknowledged, whatever robots and stores do."""

from __future__ import annotations

import grpc
import pytest

from tests.fleet.fleets import Hand, MemorySpool, hello, wait_until
from vla_rl.contract.errors import UserError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.disk import StoreFullError
from vla_rl.fleet.link import UnreachableError
from vla_rl.fleet.protocol import MAX_RECORDS, write_records
from vla_rl.fleet.transport import FleetTransport, TransportOptions

Code = grpc.StatusCode
ONE_MESSAGE = {"memory_mb": 1, "max_robots": 16}  # the credit of a robot: what remains in flight stops it


def spool_of(count, **given):
    spool = MemorySpool(**given)
    spool.put(count)
    return spool


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
    assert len(store.records) == 5 and set(server.connected()) == {old.records[0].sender, new.records[0].sender}


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
        ({"schema_hash": b"x" * 32}, Code.FAILED_PRECONDITION, "records other things"),
        ({"schema_hash": b""}, Code.INVALID_ARGUMENT, "0 bytes as schema_hash"),
        ({"epoch": b"1"}, Code.INVALID_ARGUMENT, "1 bytes as epoch"),
    ],
)
def test_whoever_does_not_fit_is_refused_in_one_sentence(serve, fields, code, sentence):
    with Hand(serve(schema_hash=bytes(32)).port) as hand:
        hand.send(hello(spool_of(1), **fields))
        assert hand.ending()[0] is code
    with Hand(serve(schema_hash=bytes(32)).port) as hand:
        hand.send(hello(spool_of(1), **fields))
        assert sentence in hand.ending()[1]


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


def test_a_store_that_fails_costs_nothing(serve, link, store):
    store.error = StoreFullError("no room is left; free some.")
    spool = spool_of(4)
    state = link(serve().port, spool).status
    wait_until(lambda: "no room is left" in state().trouble)
    assert not spool.acknowledgements
    store.error = None
    wait_until(lambda: state().durable == 3)
    assert store.records == spool.records


def test_a_mistake_of_the_store_does_not_end_the_server(serve, link, store):
    store.error = ZeroDivisionError("a bug")
    spool = spool_of(4)
    state = link(serve().port, spool).status
    wait_until(lambda: "could not store a batch" in state().trouble)
    store.error = None
    wait_until(lambda: state().durable == 3)


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


def test_a_message_may_hold_as_many_records_as_the_robot_sends(serve, link, store):
    spool = spool_of(MAX_RECORDS + 40, payload=b"\x80")
    state = link(serve().port, spool).status
    wait_until(lambda: state().durable == MAX_RECORDS + 39)
    assert store.records == spool.records


def test_a_heartbeat_is_answered(serve):
    with Hand(serve().port) as hand:
        hand.greet(spool_of(1))
        hand.send(pb.FromRobot(heartbeat=pb.Heartbeat(sent_ns=42)))
        assert hand.next("clock").echo_ns == 42
