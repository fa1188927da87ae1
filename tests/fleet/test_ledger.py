"""A ledger stores every record once and in order, refuses gaps and contradictions, and remembers it all."""

from __future__ import annotations

import pytest

from tests.fleet.records import EPOCH, chain, follow
from vla_rl.contract.errors import UserError
from vla_rl.fleet.disk import StoreFullError
from vla_rl.fleet.ledger import ConflictError, GapError, Ledger
from vla_rl.fleet.record import FleetRecord, Sender

ARM = Sender("arm", EPOCH)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "robots" / "ledger"


@pytest.fixture
def ledger(folder):
    with_small_segments = Ledger(folder, reserve=0, segment_bytes=1500)
    yield with_small_segments
    with_small_segments.close()


def stored(ledger: Ledger) -> list[FleetRecord]:
    return [record for _, record in ledger.read(0, 10_000)]


def test_what_is_appended_is_read_in_order_and_is_there_after_opening_again(ledger, folder):
    records = chain(30)
    for i in range(0, 30, 4):
        assert ledger.append(records[i : i + 4]).durable == {ARM: min(i + 3, 29)}
    assert stored(ledger) == records
    assert [position for position, _ in ledger.read(3, 5)] == [4, 5, 6, 7, 8]
    ledger.close()
    again = Ledger(folder, reserve=0)
    assert stored(again) == records and again.head(*ARM) == (29, records[-1].hash)
    more = follow(records, 3)
    assert again.append(more).refused == {} and stored(again) == records + more
    again.close()


def test_a_record_that_is_sent_again_is_stored_once(ledger):
    records = chain(8)
    ledger.append(records[:5])
    assert ledger.append([*records[2:], *records[3:]]).durable == {ARM: 7}
    assert stored(ledger) == records


def test_a_gap_is_refused_and_says_what_is_expected(ledger):
    records = chain(6)
    receipt = ledger.append([*records[:2], *records[3:]])
    error = receipt.refused[ARM]
    assert isinstance(error, GapError) and error.expected == 2 and receipt.durable == {ARM: 1}
    assert stored(ledger) == records[:2]


def test_another_record_of_the_same_number_is_refused_and_set_aside(ledger, folder):
    records, others = chain(4), chain(4, size=30)
    ledger.append(records)
    for wrong in ([others[2]], follow(others, 1)):
        receipt = ledger.append(wrong)
        assert isinstance(receipt.refused[ARM], ConflictError) and receipt.durable == {ARM: 3}
    assert stored(ledger) == records
    ledger.close()
    again = Ledger(folder)
    assert again.conflicts() == [others[2], *follow(others, 1)]
    again.close()


def test_two_different_records_of_one_number_in_one_batch(ledger):
    records, others = chain(3), chain(3, size=30)
    assert isinstance(ledger.append([records[0], others[0]]).refused[ARM], ConflictError)
    assert stored(ledger) == records[:1]


def test_one_senders_error_does_not_stop_the_others(ledger):
    mine, theirs = chain(4), chain(4, robot="leg")
    receipt = ledger.append([mine[0], theirs[1], mine[1], theirs[0]])
    assert receipt.durable == {ARM: 1, Sender("leg", EPOCH): -1} and list(receipt.refused) == [("leg", EPOCH)]
    assert stored(ledger) == mine[:2]


def test_epochs_of_one_robot_are_numbered_apart(ledger):
    first, second = chain(3), chain(2, epoch="f" * 32)
    ledger.append([*first, *second])
    assert {sender: head.last for sender, head in ledger.senders().items()} == {ARM: 2, ("arm", "f" * 32): 1}
    assert ledger.sent_by(ARM, 1, 10) == first[1:]


def test_a_dropped_record_closes_the_gap_it_stands_for(ledger):
    records = chain(8)
    values = {"robot": "arm", "epoch": EPOCH, "kind": "dropped", "episode": "e0"}
    dropped = FleetRecord(seq=2, count=4, previous=records[1].hash, payload=records[5].hash, **values)
    ledger.append(records[:4])
    receipt = ledger.append([dropped, *records[6:]])
    assert receipt.refused == {} and receipt.durable == {ARM: 7}
    assert stored(ledger) == [*records[:4], dropped.after(3, records[3].hash), *records[6:]]
    assert ledger.append([dropped]).refused == {}  # sent again
    assert ledger.sent_by(ARM, 5, 2) == [dropped.after(3, records[3].hash), records[6]]


def test_a_lost_index_is_made_anew_from_the_segments(ledger, folder):
    records = chain(30)
    for i in range(0, 30, 4):
        ledger.append(records[i : i + 4])
    ledger.close()
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    again = Ledger(folder)
    assert stored(again) == records and again.head(*ARM) == (29, records[-1].hash)
    assert again.append(follow(records, 1)).durable == {ARM: 30}
    again.close()


def test_a_damaged_index_is_set_aside_and_made_anew(ledger, folder, caplog):
    records = chain(30)
    ledger.append(records)
    ledger.close()
    path = folder / "index.sqlite"
    path.write_bytes(b"?" * path.stat().st_size)
    again = Ledger(folder)
    assert stored(again) == records and "made anew from the segments" in caplog.text
    assert (folder / "index.sqlite.damaged").exists()
    again.close()


def test_one_process_at_a_time(ledger, folder):
    with pytest.raises(UserError, match="is in use by another process"):
        Ledger(folder)


def test_nothing_is_stored_beyond_the_reserve(folder):
    ledger = Ledger(folder, reserve=1 << 60)
    assert ledger.room() == 0
    with pytest.raises(StoreFullError, match="stay free, so they are not stored"):
        ledger.append(chain(1))
    assert stored(ledger) == [] and ledger.append([]).durable == {}
    ledger.close()


def test_reading_stops_at_the_bytes_that_were_asked_for(ledger):
    ledger.append(chain(10, size=400))
    assert [len(ledger.read(0, 10, max_bytes=limit)) for limit in (1, 1200, 100_000)] == [1, 2, 10]
