"""A robot's spool keeps what it said is on the disk, drops only autonomous episodes, and makes nobody wait."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import threading
from contextlib import closing
from itertools import count, pairwise

import pytest

from tests.fleet.records import EPOCH
from tests.fleet.test_bad_disk import Unreadable
from tests.fleet.test_power_cut import at
from tests.fleet.torn_disk import Point, PowerCut, TornDisk
from tests.patience import PATIENCE, wait_until
from vla_rl.contract.errors import UserError
from vla_rl.fleet.disk import StoreEndedError, StoreFullError
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import NO_HASH, FleetRecord
from vla_rl.fleet.spool import Spool, SpoolOptions, SpoolStore
from vla_rl.fleet.transport import FleetTransport, TransportOptions

SMALL = SpoolOptions(quota_mb=0.004, reserve_mb=0)


def record(episode: str, n: int, intervened: bool = False, kind: str = "step", size: int = 100) -> FleetRecord:
    payload = (f"{episode} {n} ".encode() * size)[:size]
    fields = {"episode": episode, "payload": payload, "wall_ns": n, "intervened": intervened}
    return FleetRecord(robot="arm", epoch=EPOCH, seq=0, kind=kind, previous=NO_HASH, **fields)


def episode(name: str, steps: int = 4, person: int = -1) -> list[FleetRecord]:
    """The records of an episode; a person chose step ``person``."""
    return [record(name, n, n == person) for n in range(steps)] + [record(name, steps, kind="episode_end")]


def store(tmp_path, **options) -> SpoolStore:
    given = SpoolOptions(**{"reserve_mb": 0, **options})
    return SpoolStore(tmp_path / "spool", "arm", given, segment_bytes=600)


def everything(spool: SpoolStore) -> list[FleetRecord]:
    found: list[FleetRecord] = []
    seq = spool.first
    while seq <= spool.last:
        found += spool.read(seq, 500)
        seq = found[-1].last + 1
    return found


def names(records: list[FleetRecord]) -> list[str]:
    return [one.episode or one.kind for one in records]


def arrives(spool: SpoolStore, folder) -> list[FleetRecord]:
    """What a server that takes it all has then; it refuses nothing."""
    with closing(Ledger(folder, reserve=0)) as server:
        receipt = server.append(everything(spool))
        assert receipt.refused == {} and receipt.durable == {spool.sender: spool.last}
        return [one for _, one in server.read(0, 1000)]


def test_records_are_numbered_and_the_chain_goes_on_after_opening_again(tmp_path):
    with closing(store(tmp_path)) as first:
        first.add(episode("a"))
    with closing(store(tmp_path)) as second:
        assert second.sender == first.sender
        second.add(episode("b"))
        found = arrives(second, tmp_path / "server")
    assert [one.seq for one in found] == list(range(10)) and names(found) == ["a"] * 5 + ["b"] * 5


def test_a_new_folder_is_a_new_epoch_and_another_robots_is_refused(tmp_path):
    with closing(store(tmp_path)) as first, closing(store(tmp_path / "other")) as second:
        assert first.sender.epoch != second.sender.epoch
        first.add(episode("a"))
    with pytest.raises(UserError, match="is of robot 'arm' and not of 'leg'"):
        SpoolStore(tmp_path / "spool", "leg")
    store(tmp_path).close()  # it was left closed


def test_what_the_server_has_leaves_the_disk_in_whole_segments(tmp_path):
    with closing(store(tmp_path)) as spool:
        for name in "abc":
            spool.add(episode(name))
        files = len([*(tmp_path / "spool").glob("*.seg")])
        spool.acknowledged(8)
        assert spool.first == 5 and len([*(tmp_path / "spool").glob("*.seg")]) < files
        spool.acknowledged(14)
        assert spool.first == spool.last + 1 == 15
    with closing(store(tmp_path)) as again:
        assert again.last == 14  # it goes on with the numbers
        again.add(episode("d"))
        assert names(again.read(15, 10_000)) == ["d"] * 5


def test_a_full_quota_drops_the_oldest_autonomous_episodes_and_never_an_intervention(tmp_path):
    with closing(store(tmp_path, quota_mb=0.005)) as spool:
        for name, person in (("a", -1), ("b", 2), ("c", -1), ("d", -1), ("e", -1), ("f", 0), ("g", 1)):
            spool.add(episode(name, person=person))
        assert (spool.dropped_episodes, spool.dropped_records) == (2, 10)
        found = arrives(spool, tmp_path / "server")
        expected = ["dropped", *["b"] * 5, "dropped", *["d"] * 5, *["e"] * 5, *["f"] * 5, *["g"] * 5]
        assert names(found) == expected and [one.count for one in found if one.kind == "dropped"] == [5, 5]
        assert sum(path.stat().st_size for path in (tmp_path / "spool").glob("*.seg")) < 9000
    with closing(store(tmp_path)) as again:
        assert names(everything(again)) == expected


def test_dropped_episodes_beside_each_other_are_one_record(tmp_path):
    with closing(store(tmp_path, quota_mb=0.003)) as spool:
        for name in "abcdefg":
            spool.add(episode(name))
        (dropped, *kept) = arrives(spool, tmp_path / "server")
        assert dropped.count == spool.dropped_records and names(kept) == ["e"] * 5 + ["f"] * 5 + ["g"] * 5


def test_what_the_server_has_of_an_episode_that_is_dropped_then_is_no_contradiction(tmp_path):
    with closing(store(tmp_path, quota_mb=0.003)) as spool, closing(Ledger(tmp_path / "server", reserve=0)) as server:
        spool.add(episode("a"))
        server.append(spool.read(0, 10_000)[:3])
        spool.acknowledged(2)
        for name in "bcd":
            spool.add(episode(name))
        assert spool.dropped_episodes
        assert server.append(spool.read(3, 10_000)).refused == {} and server.durable(*spool.sender) == 19


def test_a_running_episode_that_alone_fills_the_quota_is_dropped_whole(tmp_path):
    with closing(store(tmp_path, quota_mb=0.001)) as spool:
        for one in episode("a", 20):
            spool.add([one])
        spool.add([record("", 0, kind="event")])
        dropped, rest, event = arrives(spool, tmp_path / "server")
        assert (dropped.kind, rest.kind, event.kind) == ("dropped", "dropped", "event")
        assert dropped.count + rest.count == spool.dropped_records == 21 and spool.dropped_episodes == 1


@pytest.mark.parametrize("person", [0, 2, 4])
def test_a_correction_is_kept_wherever_in_its_episode_it_was_also_after_opening_again(person, tmp_path):
    with closing(store(tmp_path, quota_mb=0.004)) as spool:
        records = episode("a", 6, person)
        for begin in range(0, 7, 2):  # as they come: what follows the correction is autonomous
            spool.add(records[begin : begin + 2])
        for name in "bcd":
            spool.add(episode(name, 6))
        assert names(everything(spool)).count("a") == 7 and spool.dropped_episodes > 0
    with closing(store(tmp_path, quota_mb=0.004)) as again:
        for name in "efg":
            again.add(episode(name, 6))
        assert names(everything(again)).count("a") == 7 and again.dropped_episodes > 0


def test_a_full_disk_drops_too_and_what_may_not_go_is_refused(tmp_path):
    disk = TornDisk(tmp_path)
    with closing(SpoolStore(tmp_path / "spool", "arm", SpoolOptions(reserve_mb=1), disk)) as spool:
        spool.add(episode("a"))
        spool.add(episode("b", person=1))
        disk.room = 1 << 20
        with pytest.raises(StoreFullError):
            spool.add(episode("c", person=1))
        assert names(everything(spool)) == ["dropped", *["b"] * 5]
        disk.room = 1 << 30
        spool.add(episode("c", person=1))
        assert names(everything(spool))[-1] == "c"


def test_a_record_that_the_disk_spoilt_is_told_and_the_rest_is_sent(tmp_path):
    with closing(store(tmp_path)) as spool:
        spool.add(episode("a"))
    (path,) = [one for one in (tmp_path / "spool").glob("*.seg") if b"a 2" in one.read_bytes()]
    path.write_bytes(path.read_bytes().replace(b"a 2 a 2", b"a 2 b 2"))
    with closing(store(tmp_path)) as again:
        assert names(arrives(again, tmp_path / "server")) == ["a", "a", "dropped", "a", "a"]


def live(spool: SpoolStore, told: list[int]) -> None:
    """Episodes of which some are dropped and some are acknowledged; ``told`` is what is durable."""
    for number, name in enumerate("abcdef"):
        spool.add(episode(name, person=2 if number == 1 else -1))
        told.append(spool.last)
        if name == "d":
            spool.acknowledged(9)


@pytest.mark.parametrize("left", ["nothing", "torn"])
def test_after_a_power_cut_at_any_point_what_was_on_the_disk_is_sent_in_order(left, tmp_path):
    stride = 9 if left == "nothing" else 13
    for number in count(1, stride):
        root = tmp_path / f"cut{number}"
        root.mkdir()
        disk, told, spool = TornDisk(root), [-1], None
        disk.before = at(number, disk.cut)
        with contextlib.suppress(PowerCut, UserError, sqlite3.Error):
            spool = SpoolStore(root / "spool", "arm", SMALL, disk, segment_bytes=600)
            live(spool, told)
        over = disk.points < number
        disk.before = lambda point: None
        disk.kill(spool.close if spool else lambda: None)
        after = disk.left(tmp_path / f"left{number}", left, number)
        with closing(SpoolStore(after.root / "spool", "arm", SMALL, after, segment_bytes=600)) as again:
            assert again.last >= told[-1] and (told == [-1] or again.sender == spool.sender)
            again.add(episode("z"))
            found = everything(again)
            assert [one.seq for one in found[1:]] == [one.last + 1 for one in found[:-1]]
            assert all(one.previous == before.hash for before, one in pairwise(found))
            if found[0].seq <= 5 and told[-1] >= 9:  # nothing that a person chose is dropped
                assert names(found).count("b") == 5
        if over:
            assert disk.points > 100
            return


class Hanging(TornDisk):
    """A disk that can be made to hang."""

    def __init__(self, root) -> None:
        super().__init__(root)
        self.going = threading.Event()
        self.going.set()
        self.before = self._hang

    def _hang(self, point: Point) -> None:
        self.going.wait()


def put(spool: Spool, records: list[FleetRecord]) -> None:
    for one in records:
        spool.put(one.kind, one.payload, episode=one.episode, intervened=one.intervened)


@pytest.fixture
def disk(tmp_path):
    made = Hanging(tmp_path)
    yield made
    made.going.set()


def kept(spool: Spool) -> list[FleetRecord]:
    return everything(spool._store)


def test_a_disk_that_hangs_makes_nobody_wait_and_costs_whole_autonomous_episodes(tmp_path, disk):
    spool = Spool(tmp_path / "spool", "arm", SpoolOptions(reserve_mb=0, queue_mb=0.001), disk)
    with closing(spool):
        put(spool, episode("a"))
        assert spool.flush(10)
        disk.going.clear()
        put(spool, episode("b"))  # would never return if it waited
        put(spool, episode("c", 30))
        put(spool, episode("d", 15, person=0))
        assert not spool.flush(0.05) and spool.next_seq == 5
        disk.going.set()
        assert spool.flush(10)
        found = kept(spool)
        assert names(found) == ["a"] * 5 + ["b"] * 5 + ["dropped"] + ["d"] * 16 and found[10].count == 31
        assert spool.dropped == (1, 31)


def test_nothing_is_sent_before_the_next_record_says_so(tmp_path):
    """Between the two, an acknowledgement would be of a record that does not exist yet."""
    stored, told = threading.Event(), threading.Event()
    with closing(Spool(tmp_path / "spool", "arm", SpoolOptions(reserve_mb=0))) as spool:
        add = spool._store.add

        def slowly(records):
            add(records)
            stored.set()
            told.wait()

        spool._store.add = slowly
        try:
            put(spool, episode("a"))
            stored.wait()
            assert spool._store.last >= 0 and spool.next_seq == 0 and spool.unacknowledged(0, 10_000) == []
        finally:
            told.set()
        assert spool.wait(4, PATIENCE)
        assert [one.seq for one in spool.unacknowledged(0, 10_000)] == [*range(5)]


def test_a_spool_gives_nothing_up_that_cannot_be_read_for_a_moment(tmp_path):
    with closing(SpoolStore(tmp_path / "spool", "arm", SMALL, disk := Unreadable())) as spool:
        spool.add(episode("a"))
        disk.fails = True
        with pytest.raises(OSError, match="the test's disk"):
            spool.read(0, 10_000)
        disk.fails = False
        assert names(spool.read(0, 10_000)) == ["a"] * 5 and spool.dropped_records == 0


def test_a_disk_that_fails_is_opened_again_and_nothing_is_stored_twice(tmp_path, disk, monkeypatch):
    monkeypatch.setattr("vla_rl.fleet.spool._RETRY_S", 0.01)
    with closing(Spool(tmp_path / "spool", "arm", SpoolOptions(reserve_mb=0), disk)) as spool:
        put(spool, episode("a"))
        assert spool.flush(10)

        def fail(point: Point) -> None:
            if point.what == "sync" and point.name.endswith(".seg"):
                raise OSError(errno.EIO, "the test's disk")

        disk.before = fail
        put(spool, episode("b"))
        wait_until(lambda: spool.trouble)
        disk.before = lambda point: None
        assert spool.flush(10) and not spool.trouble
        assert names(kept(spool)) == ["a"] * 5 + ["b"] * 5


def test_the_rest_of_an_episode_that_was_given_up_is_not_stored_by_a_store_that_is_opened_again(
    tmp_path, disk, monkeypatch
):
    monkeypatch.setattr("vla_rl.fleet.spool._RETRY_S", 0.01)
    with closing(Spool(tmp_path / "spool", "arm", SpoolOptions(reserve_mb=0, queue_mb=0.001), disk)) as spool:
        disk.going.clear()
        put(spool, episode("a"))
        put(spool, episode("b", 30)[:-3])  # more than memory has room for
        disk.going.set()
        assert spool.flush(10) and spool.dropped == (1, 28)
        failed = spool._store
        failed._ledger._index.close()
        with pytest.raises(StoreEndedError):
            spool.unacknowledged(0, 10_000)
        wait_until(lambda: spool._store is not failed)
        put(spool, episode("b", 30)[-3:])
        put(spool, episode("c"))
        assert spool.flush(10)
        found = kept(spool)
        assert names(found) == ["a"] * 5 + ["dropped"] + ["c"] * 5 and found[5].count == spool.dropped[1] == 31


def test_a_store_that_fails_while_it_is_read_is_opened_again_though_nothing_is_put(tmp_path, disk, monkeypatch):
    monkeypatch.setattr("vla_rl.fleet.spool._RETRY_S", 0.01)
    with closing(Spool(tmp_path / "spool", "arm", SpoolOptions(reserve_mb=0), disk)) as spool:
        put(spool, episode("a"))
        assert spool.flush(10)
        spool._store._ledger._index._db.execute("DROP TABLE segments")  # what SQLite says of a failing disk
        with pytest.raises(StoreEndedError):
            spool.unacknowledged(0, 10_000)
        wait_until(lambda: not spool._ended and spool._store.last == 4)
        assert [one.seq for one in spool.unacknowledged(0, 10_000)] == [*range(5)]


def test_the_link_waits_for_what_is_on_the_disk_and_unsent_records_are_counted(tmp_path, disk):
    with closing(Spool(tmp_path / "spool", "arm", SpoolOptions(reserve_mb=0), disk)) as spool:
        disk.going.clear()
        put(spool, episode("a"))
        assert not spool.wait(0, 0.05)
        wait_until(lambda: spool._busy)
        assert spool.unsent == 5, "on their way to a disk that hangs"
        disk.going.set()
        assert spool.wait(4, 10) and spool.unsent == 5
        spool.acknowledged(2)
        assert spool.unsent == 2 and [one.seq for one in spool.unacknowledged(3, 10_000)] == [3, 4]


@pytest.fixture
def opened(tmp_path, ending):
    """``opened()``: the server's ledger, opened again each time."""

    def open_ledger():
        return ending.enter_context(closing(Ledger(tmp_path / "server", reserve=0)))

    return open_ledger


def spool_in(folder, **options):
    return Spool(folder, "arm", SpoolOptions(**{"reserve_mb": 0, **options}))


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
    assert names([one for _, one in ledger.read(0, 10_000)]) == sent and len(ledger.senders()) == 1
    server.close()
