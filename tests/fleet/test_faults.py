"""The small form of ``make faults``: processes are killed while records are in flight, and nothing is lost."""

from __future__ import annotations

import pytest

from tests.faults.__main__ import play, what_is_wrong
from tests.faults.audit import Claim, Findings, audit, enter
from tests.faults.known import fields_of
from tests.fleet.records import EPOCH
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import NO_HASH, FleetRecord, Sender

ROUNDS = [
    ("server", "before acknowledgement", "reset"),
    ("server", "within write", ""),
    ("robot", "before acknowledged", ""),
    ("robot", "after put", "flipped_bit"),
    ("server", "", "full_disk"),
    ("learner", "after publication", ""),
    ("learner", "within state", ""),
]


@pytest.mark.full
def test_whoever_is_killed_comes_back_and_all_is_stored_and_learnt_from_once_and_in_order(tmp_path):
    found = play(tmp_path / "fleet", ROUNDS, robots=2)
    assert what_is_wrong(found) == ""
    assert found["rounds"] >= len(ROUNDS)
    assert all(found["hits"][kind][point or "random moment"] for kind, point, _ in ROUNDS)
    assert found["stored"] + found["dropped"] >= found["acknowledged"] >= 150 * 5  # of rounds of servers and robots
    learner = found["learner"]
    assert learner["episodes"] > 10 and learner["versions"] > 3 and learner["looks"] > 2
    assert "server was hit fewer than 100 times" in what_is_wrong(found, 100)
    for name in ("lost", "duplicated", "reordered"):
        assert f"1 episodes {name}" in what_is_wrong(found | {"learner": learner | {name: 1}})
    assert "amiss" in what_is_wrong(found | {"learner": learner | {"wrong": ["amiss"]}})


def records(count: int) -> list[FleetRecord]:
    made: list[FleetRecord] = []
    for seq in range(count):
        previous = made[-1].hash if made else NO_HASH
        made.append(FleetRecord(robot="arm", epoch=EPOCH, seq=seq, previous=previous, **fields_of("arm", EPOCH, seq)))
    return made


def test_the_audit_counts_what_is_not_there(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(records(50))
    ledger.close()
    claims = [Claim(Sender("arm", EPOCH), 50, 50), Claim(Sender("leg", EPOCH), 3, 5)]
    found = audit(tmp_path / "ledger", claims)
    assert (found.acknowledged, found.stored, found.lost, found.duplicated, found.reordered) == (53, 50, 5, 0, 0)
    assert found.strangers == []
    assert "records of" in audit(tmp_path / "ledger", claims[1:]).strangers[0]


def test_the_audit_counts_what_is_there_twice_or_too_late():
    found, there, last = Findings(), set[int](), dict[Sender, int]()
    made = records(4)
    for seq in (0, 2, 1, 3, 3):
        enter(made[seq], found, there, last)
    assert (found.duplicated, found.reordered, there) == (1, 2, {0, 1, 2, 3})
