"""Bad links and restarts cost nothing: every record is stored once, in order, and acknowledged in the end."""

from __future__ import annotations

import queue
import random

import pytest

from tests.fleet.fleets import Hand, JumpingClock, MemorySpool, hello
from tests.fleet.proxy import Proxy
from tests.patience import wait_until
from vla_rl.contract.errors import ContractError
from vla_rl.fleet import fleet_pb2 as pb
from vla_rl.fleet.link import Attempt, LinkOptions, LinkState
from vla_rl.fleet.protocol import MAX_RECORDS, Backoff, BackoffOptions
from vla_rl.fleet.record import FleetRecord


@pytest.fixture
def spool():
    made = MemorySpool(payload=b"x" * 5000)
    made.put(60)
    return made


def hour_after_hour(reached, *clocks):
    """Hours pass until a state is reached; what was on its way when the first began may still have arrived."""

    def later():
        for clock in clocks:
            clock.ahead += 3600.0
        return reached()

    wait_until(later)


@pytest.mark.parametrize("seed", range(3))
def test_a_link_that_is_cut_anywhere_in_a_frame_loses_nothing(serve, link, store, spool, seed):
    draw = random.Random(seed)
    with Proxy(serve().port) as proxy:
        state = link(proxy.port, spool, batch_kb=16).status
        for cut in range(1, 9):
            proxy.cut_after(draw.randrange(100_000))
            spool.put(30)
            wait_until(lambda cut=cut: state().attempts > cut or state().durable == spool.next_seq - 1)
        wait_until(lambda: state().durable == spool.next_seq - 1)
        assert proxy.accepted > 1
    assert store.records == spool.records


def test_a_laptop_that_is_closed_for_an_hour_in_mid_upload_goes_on(serve, link, store, spool):
    ours, theirs = JumpingClock(), JumpingClock()
    server = serve(clock=theirs)
    with Proxy(server.port) as proxy:
        state = link(proxy.port, spool, batch_kb=16, clock=ours).status
        wait_until(lambda: state().durable >= 0)
        proxy.freeze()  # nothing arrives, and nobody is told
        spool.put(200)
        hour_after_hour(lambda: not server.waiting() and "silent" in state().trouble, ours, theirs)
        proxy.thaw()
        wait_until(lambda: state().durable == 259)
    assert store.records == spool.records


def test_whoever_connects_and_says_nothing_is_sent_away(serve):
    clock = JumpingClock()
    server = serve(clock=clock, max_robots=1)
    with Hand(server.port) as hand:
        wait_until(lambda: server._opening)
        hour_after_hour(lambda: not server._opening, clock)
        hand.ending()


def test_a_slow_disk_is_no_silence(serve, link, store, spool):
    clock = JumpingClock()
    store.slow.clear()
    server = serve(clock=clock)
    state = link(server.port, spool, heartbeat_s=3600.0, silence_s=86400.0).status
    wait_until(lambda: any(one.session.busy for one in server._connected.values()))
    rounds = [clock.waits]
    hour_after_hour(lambda: clock.waits > rounds[0] + 3, clock)  # the server looks for the silent meanwhile
    (one,) = server._connected.values()
    store.slow.set()
    wait_until(lambda: state().durable == 59)
    assert state().attempts == 1 and one.session.durable == 59


def test_a_robot_begins_before_its_server(serve, link, store, spool):
    with Proxy(1) as proxy:
        proxy.refuse()
        state = link(proxy.port, spool).status
        wait_until(lambda: state().attempts > 2)
        assert state().trouble and not state().connected
        proxy.to = serve().port
        proxy.refuse(False)
        wait_until(lambda: state().durable == 59)


def test_waits_double_up_to_a_limit_and_are_spread():
    class Most(random.Random):
        def uniform(self, low, high):
            return high

    longest = Backoff(BackoffOptions(first_s=0.5, longest_s=4.0), Most())
    assert [longest.next() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    longest.reset()
    assert longest.next() == 0.5
    drawn = Backoff(BackoffOptions(first_s=1.0, longest_s=1.0), random.Random(0))
    waits = [drawn.next() for _ in range(200)]
    assert 0.5 <= min(waits) < 0.55 and 0.95 < max(waits) <= 1.0


BATCH = 1024  # bytes, of which a message has about as many


class Still:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall_ns(self) -> int:
        return 5_000_000_000


class Wire:
    """A channel whose other end is the test: ``outgoing`` is what gRPC would send."""

    def stream_stream(self, path: str):
        def begin(outgoing):
            self.outgoing = outgoing
            return queue.SimpleQueue()

        return begin


class Robot:
    def __init__(self, records: int = 20, credit: int = 1 << 20, batch_kb: int = 1, payload: int = 700) -> None:
        self.spool, self.state, self.told = MemorySpool(payload=bytes(payload)), LinkState(), list[tuple[int, str]]()
        self.spool.put(records)
        self.wire, self.clock = Wire(), Still()
        options = LinkOptions(batch_kb=batch_kb)
        self.attempt = Attempt(
            self.wire,  # type: ignore[arg-type]
            self.spool,
            hello(self.spool).hello,
            options,
            self.state,
            self.clock,  # type: ignore[arg-type]
            lambda *policy: self.told.append(policy),
        )
        self.hears(welcome=pb.Welcome(durable_seq=-1, credit_bytes=credit))

    def hears(self, **message: object) -> None:
        self.attempt._take(pb.FromServer(**message))

    def sends(self) -> list[FleetRecord]:
        return [*self.attempt._batch()]


def size(records: list[FleetRecord]) -> int:
    return sum(len(one.encoded) for one in records)


@pytest.fixture(autouse=True)
def glance(monkeypatch):
    monkeypatch.setattr("vla_rl.fleet.link._GLANCE_S", 0.01)


@pytest.mark.parametrize(("spare", "second"), [(0, True), (-1, False)])
def test_the_whole_credit_may_be_on_its_way_and_no_byte_more(spare, second):
    first = Robot().sends()
    robot = Robot(credit=size(first) + BATCH + spare)
    assert robot.sends() and bool(robot.sends()) == second


def test_an_acknowledgement_of_the_newest_record_gives_all_credit_back_and_it_may_shrink():
    robot = Robot(credit=1)
    first = robot.sends()
    assert first and not robot.sends(), "a message is sent whatever the credit, and then none"
    robot.hears(ack=pb.Ack(durable_seq=first[-1].seq, credit_bytes=1))
    second = robot.sends()
    assert second and robot.state.durable == first[-1].seq, "nothing is on its way any more"
    robot.hears(ack=pb.Ack(durable_seq=first[-1].seq, credit_bytes=1 << 20))
    assert robot.sends()
    robot.hears(ack=pb.Ack(durable_seq=second[-1].seq, credit_bytes=1))
    assert not robot.sends(), "the third is on its way, and the credit is less than before"


def test_after_a_refusal_it_sends_from_there_with_all_of_its_credit():
    robot = Robot(credit=1)
    first = robot.sends()
    assert not robot.sends()
    robot.hears(nack=pb.Nack(expected=0))
    assert robot.sends() == first


def test_a_refusal_while_records_are_read_counts_and_what_was_read_is_not_sent(monkeypatch):
    robot = Robot()
    robot.sends()
    read = robot.spool.unacknowledged

    def refused(seq: int, count: int) -> list[FleetRecord]:
        robot.hears(nack=pb.Nack(expected=0))
        return read(seq, count)

    monkeypatch.setattr(robot.spool, "unacknowledged", refused)
    assert robot.sends() == []
    monkeypatch.setattr(robot.spool, "unacknowledged", read)
    assert robot.sends()[0].seq == 0


def test_the_first_record_is_acknowledged_and_none_that_does_not_exist():
    robot = Robot(records=3)
    assert robot.spool.acknowledgements == [], "of the welcome, when the server had none"
    robot.hears(ack=pb.Ack(durable_seq=0, credit_bytes=1))
    robot.hears(ack=pb.Ack(durable_seq=2, credit_bytes=1))
    assert robot.spool.acknowledgements == [0, 2]
    with pytest.raises(ContractError, match="acknowledged record 3, which does not exist yet"):
        robot.hears(ack=pb.Ack(durable_seq=3, credit_bytes=1))
    assert robot.spool.acknowledgements == [0, 2]


def test_a_message_holds_no_more_records_than_the_server_takes():
    robot = Robot(records=MAX_RECORDS + 5, credit=1 << 30, batch_kb=4096, payload=1)
    assert [len(robot.sends()), len(robot.sends())] == [MAX_RECORDS, 5]


def test_a_policy_is_told_when_it_changes_and_once():
    robot = Robot()
    for policy in ((0, ""), (1, "canary"), (1, "canary"), (1, "active"), (1, "active")):
        robot.hears(policy=pb.Policy(version=policy[0], state=policy[1]))
    assert robot.told == [(1, "canary"), (1, "active")] and robot.state.policy == (1, "active")


def test_a_heartbeat_says_nanoseconds():
    robot = Robot(records=0)
    assert pb.FromRobot.FromString(next(robot.wire.outgoing)).WhichOneof("message") == "hello"
    robot.spool.wait = lambda seq, seconds: setattr(robot.clock, "time", robot.clock.time + 3.0)  # type: ignore[method-assign]
    beat = pb.FromRobot.FromString(next(robot.wire.outgoing)).heartbeat
    assert beat.sent_ns == round(robot.clock.time * 1e9)


def test_an_answer_to_a_heartbeat_is_progress():
    robot = Robot(records=0)
    robot.hears(clock=pb.Clock(wall_ns=1, echo_ns=0))
    assert not robot.attempt._progress, "it answers no heartbeat"
    robot.hears(clock=pb.Clock(wall_ns=1, echo_ns=round((robot.clock.time + 9) * 1e9)))
    assert robot.attempt._progress
