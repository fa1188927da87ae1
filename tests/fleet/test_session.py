"""One robot's connection on the server, message by message: what is stored, and what is asked for again."""

from __future__ import annotations

from tests.fleet.fleets import MemorySpool
from vla_rl.fleet.ledger import GapError
from vla_rl.fleet.protocol import Clock, write_records
from vla_rl.fleet.record import Sender
from vla_rl.fleet.session import Batch, Outcome, Session


class Server:
    """A session, and the batches that it would store."""

    def __init__(self, records: int = 10, credit: int = 1 << 20) -> None:
        self.spool, self.batches = MemorySpool(), list[Batch]()
        self.spool.put(records)
        sender = Sender(self.spool.robot, self.spool.epoch)
        self.session = Session(sender, -1, self, Clock(), credit, lambda _: None)  # type: ignore[arg-type]

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
