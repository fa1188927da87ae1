"""Entries survive torn writes, and damage before the end is told."""

from __future__ import annotations

import pytest

from vla_rl.contract.errors import ContractError
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.registry import History


def history(tmp_path):
    return History(tmp_path / "history", Disk())


def test_entries_come_back_once_and_in_order(tmp_path):
    written, read = history(tmp_path), history(tmp_path)
    assert read.new() == []
    for number in range(3):
        written.append({"number": number, "text": "line\nbreak"})
        written.new()
    assert [entry["number"] for entry in read.new()] == [0, 1, 2]
    assert read.new() == []
    written.append({"number": 3})
    assert read.new() == [{"number": 3}]


def test_whatever_is_left_of_a_torn_entry_does_not_count(tmp_path):
    first = history(tmp_path)
    first.append({"number": 0})
    whole = (tmp_path / "history").read_bytes()
    first.new()
    first.append({"number": 1})
    both = (tmp_path / "history").read_bytes()
    for cut in range(len(whole), len(both)):
        for tail in (b"", b"\0\0\n"):
            (tmp_path / "history").write_bytes(both[:cut] + tail)
            after = history(tmp_path)
            assert after.new() == [{"number": 0}]
            after.append({"number": 2})
            assert history(tmp_path).new() == [{"number": 0}, {"number": 2}]


def test_damage_that_others_follow_is_told(tmp_path):
    made = history(tmp_path)
    for number in range(3):
        made.append({"number": number})
        made.new()
    data = bytearray((tmp_path / "history").read_bytes())
    data[data.index(b"1}")] ^= 1
    (tmp_path / "history").write_bytes(data)
    with pytest.raises(ContractError, match="damaged at byte"):
        history(tmp_path).new()
