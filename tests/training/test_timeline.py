"""The timeline of a run: whose spans, in which iteration, how many are kept, and how a resumed run continues it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.training.test_loop import Fake
from vla_rl.contract.errors import UserError
from vla_rl.experience.driver import KINDS, LIMIT, OWN
from vla_rl.training import timeline as module
from vla_rl.training.loop import Loop, LoopConfig, PolicyStore
from vla_rl.training.timeline import RECENT, TRACE, Timeline
from vla_rl.training.tracking import RunFolder

WAITING, SIMULATING = KINDS.index("waiting"), KINDS.index("simulating")


@pytest.fixture
def clock(monkeypatch):
    """Sets what ``now`` says."""
    times = [1000.0]
    monkeypatch.setattr(module, "now", lambda: times[0])

    def at(seconds: float) -> None:
        times[0] = 1000.0 + seconds

    return at


def test_spans_are_in_seconds_since_the_run_began(clock):
    line = Timeline(elapsed=50.0)
    clock(1)
    line.begin(1)
    with line.span("learning"):
        clock(3)
    clock(4)
    line.begin(2)
    with line.span("learning"):
        clock(5)
    learning = KINDS.index("learning")
    assert line.recent == {1: {OWN: [(learning, 51.0, 53.0)]}, 2: {OWN: [(learning, 54.0, 55.0)]}}


def test_a_collector_waits_before_and_between_its_rollouts(clock):
    line = Timeline()
    line.begin(1)
    clock(3)
    line.collected({OWN: np.zeros((0, 3)), "collector 1": np.array([[SIMULATING, 1001.0, 1002.0]])}, 1000.0)
    line.begin(2)
    clock(9)
    line.collected({OWN: np.zeros((0, 3)), "collector 1": np.array([[SIMULATING, 1006.0, 1008.0]])}, 1003.0)
    assert line.recent[1]["collector 1"] == [(WAITING, 0.0, 1.0), (SIMULATING, 1.0, 2.0)]
    assert line.recent[2]["collector 1"] == [(WAITING, 2.0, 6.0), (SIMULATING, 6.0, 8.0)]


def test_who_brings_no_spans_was_waited_for(clock):
    line = Timeline()
    line.begin(1)
    clock(2)
    line.collected({}, 1000.5)
    assert line.recent[1] == {OWN: [(WAITING, 0.5, 2.0)]}


def test_what_a_source_says_later_about_a_span_is_more_exact(clock):
    """Saving from 1 to 5 s was waiting from 2 to 4 s, which comes with the next rollout."""
    line = Timeline()
    line.begin(1)
    clock(1)
    with line.span("saving"):
        clock(5)
    line.begin(2)
    clock(7)
    line.collected({OWN: np.array([[WAITING, 1002.0, 1004.0], [WAITING, 1005.0, 1007.0]])}, 1005.0)
    saving = KINDS.index("saving")
    assert line.recent[1][OWN] == [(saving, 1.0, 2.0), (WAITING, 2.0, 4.0), (saving, 4.0, 5.0)]
    assert line.recent[2][OWN] == [(WAITING, 5.0, 7.0)]


def test_a_long_run_keeps_recent_spans(clock):
    line = Timeline()
    for i in range(1, 5 * RECENT + 1):
        clock(2 * i)
        line.begin(i)
        with line.span("learning"):
            clock(2 * i + 1)
    assert sorted(line.recent) == list(range(4 * RECENT + 1, 5 * RECENT + 1))


def test_one_iteration_keeps_a_bounded_number_of_spans(clock):
    line = Timeline()
    line.begin(1)
    for i in range(3 * LIMIT):
        line.collected({OWN: np.array([[i % 2, 1000.0 + i, 1000.5 + i]])}, 0.0)
    found = line.recent[1][OWN]
    assert len(found) <= LIMIT
    assert sum(stop - start for kind, start, stop in found if kind == SIMULATING) == 0.75 * LIMIT


def test_a_resumed_run_goes_on_and_replaces_what_it_repeats(clock, tmp_path):
    line = Timeline()
    for i in range(1, 4):
        clock(i)
        line.begin(i)
        with line.span("learning"):
            clock(i + 0.5)
    clock(100)  # the pause
    resumed = Timeline(elapsed=3.5)
    (tmp_path / TRACE).write_text(json.dumps(line.to_json()))
    resumed.restore(tmp_path / TRACE)
    resumed.begin(3)
    with resumed.span("learning"):
        clock(101)
    learning = KINDS.index("learning")
    assert resumed.recent == {
        1: {OWN: [(learning, 1.0, 1.5)]},
        2: {OWN: [(learning, 2.0, 2.5)]},
        3: {OWN: [(learning, 3.5, 4.5)]},
    }


def test_the_trace_has_a_thread_for_every_process(clock):
    line = Timeline()
    line.begin(7)
    clock(3)
    line.collected({OWN: np.zeros((0, 3)), "collector 1": np.array([[SIMULATING, 1001.0, 1002.5]])}, 1000.0)
    with line.span("learning"):
        clock(4)
    events = line.to_json()["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "learner", 1: "collector 1"}
    assert [event for event in events if event["ph"] == "X"] == [
        {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": {"iteration": 7}}
        for name, ts, dur, tid in (
            ("waiting", 0, 1_000_000, 1),
            ("simulating", 1_000_000, 1_500_000, 1),
            ("learning", 3_000_000, 1_000_000, 0),
        )
    ]


TRACES = """{{"traceEvents": [{{"ph": "M", "tid": 0, "args": {{"name": "learner"}}}},
  {{"ph": "X", "tid": 0, "ts": {}, "dur": 1, "name": "{}", "args": {{"iteration": {}}}}}]}}"""
WRONG = [(1, "sleeping", 0), (1, "learning", "Infinity"), ("NaN", "learning", 0), ("Infinity", "learning", 0)]


@pytest.mark.parametrize("text", ["", "{}", "[]", "[" * 100_000, *(TRACES.format(*span) for span in WRONG)])
def test_a_damaged_timeline_is_named_in_one_sentence(text, tmp_path):
    (tmp_path / TRACE).write_text(text)
    with pytest.raises(UserError, match=r"trace\.json is damaged .* delete that file\.$"):
        Timeline().restore(tmp_path / TRACE)


def test_a_resumed_run_continues_its_timeline(clock, tmp_path):
    folder = RunFolder(tmp_path / "run", {})
    line = Timeline(0.0)
    line.write(folder)
    assert not (folder.path / TRACE).exists(), "nothing was recorded"
    line.begin(1)
    with line.span("learning"):
        clock(2)
    folder.log("rl", 1, {})
    line.write(folder)
    folder.close()
    assert Timeline.of(folder).recent == {}
    folder.resumed = True
    assert Timeline.of(folder).recent == line.recent


def test_the_loop_says_what_it_does():
    fake = Fake([0.1, 0.9, 0.5])
    loop = Loop(fake, fake, PolicyStore(fake), fake.validate, LoopConfig(2, validate_every=1), timeline=Timeline())
    loop.run()
    did = [{KINDS[kind] for kind, _, _ in lanes[OWN]} for lanes in loop.timeline.recent.values()]
    assert did[0] == {"validating", "saving"}
    assert did[1] == {"waiting", "learning", "syncing", "validating", "saving"}
    order = [KINDS[kind] for kind, _, _ in loop.timeline.recent[1][OWN]]
    assert order == ["waiting", "learning", "syncing", "validating", "saving", "saving"]
