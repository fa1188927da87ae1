"""A record is bounded, has one encoding, and everything else is refused."""

from __future__ import annotations

import pytest

from tests.fleet.generate import GENERATED, generate
from tests.fleet.records import EPOCH, chain
from tests.test_layout import ROOT
from vla_rl.contract.errors import ContractError
from vla_rl.fleet.record import MAX_PAYLOAD, MAX_TASK, NO_HASH, FleetRecord, decode

FULL = FleetRecord(
    robot="arm-1",
    epoch=EPOCH,
    seq=7,
    kind="episode_end",
    previous=bytes(range(32)),
    episode="2026/e1",
    task="lege den Würfel ab",
    policy_version=-3,
    intervened=True,
    captured_ns=-5,
    wall_ns=1 << 62,
    payload=b"payload",
)
GOOD = {"robot": "arm", "epoch": EPOCH, "seq": 0, "kind": "step", "previous": NO_HASH}


def test_a_record_is_read_as_it_was_written():
    read = decode(FULL.encoded)
    assert read == FULL and read.encoded == FULL.encoded and read.hash == FULL.hash


@pytest.mark.parametrize("place", range(len(FULL.encoded)))
def test_a_changed_byte_is_refused_or_changes_the_hash(place):
    data = bytearray(FULL.encoded)
    data[place] ^= 0x80
    try:
        read = decode(bytes(data))
    except ContractError:
        return
    assert read.hash != FULL.hash and read.encoded == bytes(data)


@pytest.mark.parametrize("length", [0, 1, 4, 50, len(FULL.encoded) - 1, len(FULL.encoded) + 1])
def test_half_a_record_and_more_than_one_are_refused(length):
    with pytest.raises(ContractError, match="refused"):
        decode((FULL.encoded * 2)[:length])


@pytest.mark.parametrize(
    "wrong",
    [
        {"robot": ""},
        {"robot": "../arm"},
        {"robot": "a" * 65},
        {"epoch": "0" * 31},
        {"epoch": "G" * 32},
        {"kind": "steps"},
        {"episode": "e" * 129},
        {"episode": "a b"},
        {"task": "ü" * (MAX_TASK // 2 + 1)},
        {"task": "\ud800"},
        {"seq": -1},
        {"seq": 1 << 62},
        {"count": 2},
        {"count": 0},
        {"policy_version": 1 << 63},
        {"wall_ns": -(1 << 63) - 1},
        {"previous": b""},
        {"payload": bytes(MAX_PAYLOAD + 1)},
        {"kind": "dropped", "payload": b"short"},
        {"kind": "dropped", "payload": NO_HASH, "count": 1 << 62, "seq": 1},
    ],
)
def test_a_field_out_of_its_bounds_is_refused(wrong):
    assert FleetRecord(**GOOD).kind == "step"
    with pytest.raises(ContractError, match=r"so it is refused; look at"):
        FleetRecord(**GOOD | wrong)


def test_every_record_holds_the_hash_of_the_one_before():
    records = chain(4)
    assert [record.previous for record in records] == [NO_HASH, *(record.hash for record in records[:-1])]
    assert len({record.hash for record in records}) == 4


def test_a_dropped_record_stands_for_several_and_the_chain_goes_on_behind_it():
    records = chain(6)
    dropped = FleetRecord(**GOOD | {"kind": "dropped", "count": 3, "payload": records[2].hash})
    assert dropped.last == 2 and dropped.hash == records[3].previous and decode(dropped.encoded) == dropped
    rest = dropped.after(0, records[0].hash)
    assert (rest.seq, rest.last, rest.previous, rest.hash) == (1, 2, records[1].previous, records[2].hash)


def test_generating_again_changes_nothing(tmp_path):
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, which the extra dev brings")
    generate(tmp_path)
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), (
            f"{name} is old: python -m tests.fleet.generate"
        )
