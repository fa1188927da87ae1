"""Bad links and restarts cost nothing: every record is stored once, in order, and acknowledged in the end."""

from __future__ import annotations

import random

import pytest

from tests.fleet.fleets import Hand, JumpingClock, MemorySpool, wait_until
from tests.fleet.proxy import Proxy
from vla_rl.contract.errors import UserError
from vla_rl.fleet.link import LinkOptions
from vla_rl.fleet.protocol import Backoff, BackoffOptions


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


def test_a_late_and_slow_link_delivers(serve, link, store, spool):
    with Proxy(serve().port) as proxy:
        proxy.delay_s, proxy.bytes_per_s = 0.005, 2e6
        state = link(proxy.port, spool).status
        wait_until(lambda: state().durable == 59)
    assert store.records == spool.records


def test_a_laptop_that_is_closed_for_an_hour_in_mid_upload_goes_on(serve, link, store, spool):
    ours, theirs = JumpingClock(), JumpingClock()
    server = serve(clock=theirs)
    with Proxy(server.port) as proxy:
        state = link(proxy.port, spool, batch_kb=16, clock=ours).status
        wait_until(lambda: state().durable >= 0)
        proxy.freeze()  # nothing arrives, and nobody is told
        spool.put(200)
        hour_after_hour(lambda: not server.connected() and "silent" in state().trouble, ours, theirs)
        proxy.thaw()
        wait_until(lambda: state().durable == 259)
    assert store.records == spool.records


def test_a_server_that_answers_nothing_is_left_and_tried_again(serve, link, store, spool):
    clock = JumpingClock()
    with Proxy(serve().port) as proxy:
        proxy.freeze()
        state = link(proxy.port, spool, clock=clock).status
        wait_until(lambda: proxy.accepted)
        hour_after_hour(lambda: "silent" in state().trouble, clock)
        proxy.thaw()
        wait_until(lambda: state().durable == 59)
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


@pytest.mark.parametrize("address", ["nowhere", ":7790", "host:", "host:port"])
def test_an_address_without_a_host_or_a_port_is_refused(address):
    with pytest.raises(UserError, match="write HOST:PORT"):
        LinkOptions(address=address)
