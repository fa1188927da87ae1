"""Out of a ledger's records come whole episodes, and nothing else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.fleet.records import SPEC, chained, episode, introduction, step
from vla_rl.fleet.episodes import EpisodeReader, FleetEpisode
from vla_rl.fleet.payloads import LOSSLESS
from vla_rl.fleet.record import FleetRecord


def read(records: Sequence[FleetRecord]) -> tuple[list[FleetEpisode], dict[str, int]]:
    reader = EpisodeReader()
    found = [whole for record in records if (whole := reader.add(record)) is not None]
    return found, dict(reader.left_out)


def test_whole_episodes_come_with_their_steps_in_order():
    found, left_out = read(chained([introduction(), *episode("1", 3), *episode("2", 2, "time_limit", version=4)]))
    assert [(one.name, one.task, one.end.outcome, one.versions) for one in found] == [
        ("1", "lift", "success", (1, 1, 1)),
        ("2", "lift", "time_limit", (4, 4)),
    ]
    assert [one.time for one in found[0].steps] == [0, 1, 2] and found[0].spec == SPEC and not left_out
    np.testing.assert_array_equal(found[0].steps[2].images["front"], np.full((4, 6, 3), 2))


def test_robots_do_not_mix():
    left = chained([introduction(), *episode("1", 3)])
    right = [replace(record, robot="other") for record in chained([introduction(), *episode("1", 3)])]
    found, left_out = read([record for pair in zip(left, right, strict=True) for record in pair])
    assert [(one.sender.robot, len(one.steps)) for one in found] == [("arm", 3), ("other", 3)] and not left_out


def test_a_later_reader_goes_on_from_the_oldest_open_episode():
    """Wherever the first ends: the second gets records from where it says, and no introduction again."""
    left = chained([introduction(), *episode("1", 3), *episode("2", 2)])
    right = [replace(record, robot="other") for record in chained([introduction(), *episode("1", 4)])]
    records = [record for pair in itertools.zip_longest(left, right) for record in pair if record]
    whole, _ = read(records)
    for cut in range(len(records) + 1):
        first, second = EpisodeReader(), EpisodeReader()
        found = [done for at, one in enumerate(records[:cut], 1) if (done := first.add(one, at))]
        oldest = first.oldest()
        begin = cut + 1 if oldest is None else oldest
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = enumerate(records[begin - 1 :], begin)
        more = [done for at, one in rest if (done := second.add(one, at)) and at > cut]
        assert [(one.sender.robot, one.name) for one in found + more] == [(one.sender.robot, one.name) for one in whole]


@pytest.mark.parametrize(
    ("missing", "reason"),
    [(0, "incomplete"), (1, "incomplete"), (2, "incomplete"), (3, "incomplete"), (4, "unfinished")],
    ids=["introduction", "first step", "step", "last step", "end"],
)
def test_an_episode_that_lacks_a_record_is_left_out(missing: int, reason: str):
    records = chained([introduction(), *episode("1", 3), *episode("2", 2)])
    del records[missing]
    found, left_out = read(records)
    assert [one.name for one in found] == ([] if missing == 0 else ["2"])
    assert left_out == {reason: 2 if missing == 0 else 1}


def test_episodes_that_the_robot_gave_up_are_counted_and_the_next_is_whole():
    records = chained([introduction(), *episode("1", 3), *episode("2", 2)])
    gone = records[1:5]
    dropped = replace(gone[0], kind="dropped", count=len(gone), payload=gone[-1].hash)
    found, left_out = read([records[0], dropped, *records[5:]])
    assert [one.name for one in found] == ["2"] and left_out == {"incomplete": 1}


@pytest.mark.parametrize("place", [2, 4], ids=["step", "end"])
def test_an_episode_that_cannot_be_read_is_left_out_and_the_next_is_whole(place):
    records = chained([introduction(), *episode("1", 3), *episode("2", 2)])
    records[place] = replace(records[place], payload=b"\xc1")
    found, left_out = read(records)
    assert [one.name for one in found] == ["2"] and left_out == {"unreadable": 1}


def test_what_is_to_be_played_again_is_left_out():
    found, left_out = read(chained([introduction(), *episode("1", 3, "redo"), *episode("1", 2)]))
    assert [len(one.steps) for one in found] == [2] and left_out == {"redo": 1}


def test_a_step_that_comes_twice_breaks_its_episode():
    first = [*episode("1", 3)]
    found, left_out = read(chained([introduction(), first[0], first[0], *first[2:], *episode("2", 2)]))
    assert [one.name for one in found] == ["2"] and left_out == {"incomplete": 1}


def test_a_robot_that_introduces_itself_again_has_broken_its_episode_off():
    first = [*episode("1", 3)]
    found, left_out = read(chained([introduction(), *first[:2], introduction(), *first, *episode("2", 2)]))
    assert [(one.name, len(one.steps)) for one in found] == [("1", 3), ("2", 2)] and left_out == {"unfinished": 1}


MISFITS = {
    "a NaN in the state": lambda one: replace(one, state=np.array([np.nan, 0], np.float32)),
    "an infinite action": lambda one: replace(one, action=np.array([np.inf, 0], np.float32)),
    "an action of 1e30": lambda one: replace(one, action=np.array([1e30, 0], np.float32)),
    "no camera": lambda one: replace(one, images={}),
    "a state of three": lambda one: replace(one, state=np.zeros(3, np.float32)),
    "an action of one": lambda one: replace(one, action=np.zeros(1, np.float32)),
    "no label": lambda one: replace(one, labels={}),
    "another picture": lambda one: replace(one, images={"front": np.zeros((8, 8, 3), np.uint8)}),
    "a grey picture": lambda one: replace(one, images={"front": np.zeros((4, 6, 1), np.uint8)}),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_step_that_does_not_fit_puts_its_episode_aside_by_name_and_the_next_is_whole(case):
    records, told = chained([introduction(), *episode("1", 3), *episode("2", 2)]), []
    records[2] = replace(records[2], payload=MISFITS[case](step(1)).payload(LOSSLESS))
    reader = EpisodeReader(lambda *what: told.append(what))
    found = [whole.name for record in records if (whole := reader.add(record)) is not None]
    assert found == ["2"] and reader.left_out == {"unreadable": 1}
    assert [what[:2] for what in told] == [("arm", "1")]
