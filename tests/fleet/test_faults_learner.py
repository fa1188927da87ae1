"""What ``make faults`` says of a learner: lost, doubled and reordered episodes are counted, and versions that broke."""

from __future__ import annotations

import json
import random

import pytest

from tests.faults import learner
from tests.faults.known import EPISODE, LARGE, fields_of, identity
from tests.faults.learnt import Learnt, Versions, audit_learner
from tests.faults.shifts import Shifts
from tests.fleet.checkpoints import PUBLISHED, checkpoint
from tests.fleet.records import EPOCH
from vla_rl.fleet.disk import Disk
from vla_rl.fleet.episodes import EpisodeReader
from vla_rl.fleet.ledger import Ledger
from vla_rl.fleet.record import NO_HASH, FleetRecord
from vla_rl.fleet.registry import History, Registry
from vla_rl.recipes.fleet.serving import signing_key
from vla_rl.training.checkpoint import save_state


def records(episodes: int) -> list[FleetRecord]:
    made: list[FleetRecord] = []
    for seq in range(episodes * EPISODE + 1):
        previous = made[-1].hash if made else NO_HASH
        made.append(FleetRecord(robot="arm", epoch=EPOCH, seq=seq, previous=previous, **fields_of("arm", EPOCH, seq)))
    return made


def names(episodes: int) -> list[str]:
    """Of the first ones of a robot; all of their steps but those in whose place there is a large event."""
    spans = [(1 + EPISODE * i, EPISODE - 1 + EPISODE * i) for i in range(episodes)]
    return [f"arm 0 {first} {last} {len(set(range(first, last + 1)) - {LARGE, 2 * LARGE})}" for first, last in spans]


def test_what_robots_send_here_are_episodes_that_tell_which_they_are():
    reader = EpisodeReader()
    found = [whole for record in records(5) if (whole := reader.add(record)) is not None]
    assert [identity("arm", [step.action.tolist() for step in one.steps]) for one in found] == names(5)
    assert not reader.left_out and {len(one.steps) for one in found} == {38, 39}
    assert identity("arm", found[0].steps[0].action[None].tolist() * 2) == "arm 0 1 1 1"


@pytest.mark.parametrize(
    ("added", "counts"),
    [
        ("abcd", (0, 0, 0)),
        ("acd", (1, 0, 0)),
        ("", (4, 0, 0)),
        ("abbcd", (0, 1, 0)),
        ("abcdabcd", (0, 4, 0)),
        ("bacd", (0, 0, 1)),
        ("dcb", (1, 0, 2)),
    ],
)
def test_episodes_that_were_lost_doubled_and_reordered_are_counted(added, counts):
    found = Learnt()
    found.compare("abcd", added)
    assert (found.lost, found.duplicated, found.reordered) == counts
    assert found.episodes == 4 and not found.wrong


def test_an_episode_that_the_ledger_has_not_is_said():
    found = Learnt()
    found.compare("ab", "abx")
    assert found.wrong == ["an episode that the ledger has not: x"]


def test_the_last_state_is_compared_with_what_a_reader_finds_in_the_ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(records(3)[:-1])  # the third episode has no end
    ledger.close()
    state = {"position": 3 * EPISODE, "episodes": 2, "learner": {"added": names(2)}}
    found = Learnt()
    save_state(tmp_path / "run" / "state", 1, state)
    audit_learner(tmp_path / "ledger", tmp_path / "run", found)
    assert found == Learnt(episodes=2)
    save_state(tmp_path / "run" / "state", 2, state | {"position": EPISODE, "learner": {"added": names(1)}})
    audit_learner(tmp_path / "ledger", tmp_path / "run", found)
    assert (found.lost, found.duplicated) == (1, 0) and "of position 40 of 120" in found.wrong[0]


def test_the_summary_says_how_many_episodes_were_left_out(tmp_path):
    shifts = Shifts(tmp_path, random.Random(0))
    shifts.learnt.left_out.update(["incomplete", "incomplete", "redo"])
    shifts.tally.in_flight["learner"] += 1
    written = json.loads(json.dumps(shifts.summary()))
    assert written["learner"]["left_out"] == {"incomplete": 2, "redo": 1} and written["in_flight"] == {"learner": 1}


def test_versions_that_broke_or_were_published_twice_are_said(tmp_path):
    learner.found(tmp_path)
    registry, key, found = Registry(tmp_path / "registry"), signing_key(tmp_path, ""), Learnt()
    versions = Versions(tmp_path, found)
    versions.look()
    registry.publish(checkpoint(tmp_path / "next", 2), PUBLISHED, key, "learner", "a test")
    versions.look()
    versions.look(last=True)
    assert (found.versions, found.looks, found.wrong) == (2, 3, [])
    chunk = tmp_path / "registry" / "chunks" / min(registry.get(2).chunks())
    chunk.write_bytes(b"x" + chunk.read_bytes()[1:])
    manifest = tmp_path / "registry" / "manifests" / "0000000001"
    manifest.write_bytes(b"x" + manifest.read_bytes()[1:])
    history = History(tmp_path / "registry" / "history", Disk())
    history.append({**history.new()[0], "version": 2})
    versions.look(last=True)
    assert [next(word for word in ("twice", "another", "signed", "whole") if word in one) for one in found.wrong] == [
        *("twice", "another", "signed", "whole"),
    ]
    (tmp_path / "registry" / "history").write_bytes(b"")
    versions.look()
    assert "has changed" in found.wrong[-1]
