"""A robot's spool, the link, the transport and the server's ledger together: every record arrives exactly once."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.fleet.fleets import wait_until
from tests.fleet.test_spool import episode, put
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import Sender
from vla_rl.fleet.spool import Spool, SpoolOptions
from vla_rl.fleet.transport import FleetTransport, TransportOptions


@pytest.fixture
def opened(tmp_path, ending):
    """``opened()``: the server's ledger, opened again each time."""

    def open_ledger():
        return ending.enter_context(closing(Ledger(tmp_path / "server", reserve=0)))

    return open_ledger


def spool_in(folder, **options):
    return Spool(folder, "arm", SpoolOptions(**{"reserve_mb": 0, **options}))


def names(ledger):
    return [record.episode or record.kind for _, record in ledger.read(0, 10_000)]


def test_records_arrive_once_through_restarts_of_either_side(tmp_path, opened, policies, link):
    sent, ledger = [], opened()
    server = FleetTransport(ledger, policies, TransportOptions(port=0))
    options = TransportOptions(port=server.port)
    for number in range(4):
        spool = spool_in(tmp_path / "spool")
        name = f"e{number}"
        put(spool, episode(name, 20))
        sent += [name] * 21
        if number == 1:  # without a server
            server.close()
            ledger.close()
            put(spool, episode("offline", 5))
            sent += ["offline"] * 6
            assert spool.flush(10)
        connected = link(options.port, spool)
        if number == 2:
            ledger = opened()
            server = FleetTransport(ledger, policies, options)
        if number != 1:
            wait_until(lambda spool=spool: spool.next_seq == len(sent) and not spool.unsent)  # noqa: B023
        connected.close()
        spool.close()
    assert names(ledger) == sent and len(ledger.senders()) == 1
    server.close()


def test_a_spool_that_was_full_is_told_to_the_server_which_takes_the_rest(tmp_path, opened, policies, link):
    with closing(spool_in(tmp_path / "spool", quota_mb=0.004)) as spool:
        for name, person in (("a", -1), ("b", 1), ("c", -1), ("d", -1), ("e", -1)):
            put(spool, episode(name, person=person))
            assert spool.flush(10)
        ledger = opened()
        with closing(FleetTransport(ledger, policies, TransportOptions(port=0))) as on:
            connected = link(on.port, spool)
            wait_until(lambda: not spool.unsent)
            assert ledger.durable(spool.robot, spool.epoch) == 24
            connected.close()
        found = names(ledger)
        assert "dropped" in found and found.count("b") == 5 and found.count("e") == 5
        assert ledger.head(*Sender(spool.robot, spool.epoch)).last == spool.next_seq - 1
