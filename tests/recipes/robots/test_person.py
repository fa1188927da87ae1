"""A person at an arm: Enter on the terminal, what is shown of the arm, and a stop that only a person ends."""

from __future__ import annotations

import io
import itertools
import os
import select
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from tests.patience import PATIENCE
from tests.recipes.robots.arms import BLIND, OPEN_LOOP, simulated
from vla_rl.cli import robot
from vla_rl.contract.errors import UserError
from vla_rl.experience.intervention import PersonConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.drive import hold_position
from vla_rl.recipes.robots.person import EnterKey, ScriptedPerson, StatusLine, waiting
from vla_rl.recipes.robots.session import LockstepSession
from vla_rl.recipes.terminal import console


def arrived(end: int) -> None:
    assert select.select([end], [], [], PATIENCE)[0]


def test_enter_counts_once_it_is_pressed_after_the_question():
    ours, theirs = os.openpty()
    os.write(ours, b"y\n")
    arrived(theirs)
    with EnterKey(theirs) as terminal:
        assert not terminal.entered()
        os.write(ours, b"yes\n")
        arrived(theirs)
        assert terminal.entered() and not terminal.entered() and not terminal.over
    os.close(ours)
    os.close(theirs)


def test_what_is_in_a_pipe_was_meant_and_its_end_is_seen():
    reader, writer = os.pipe()
    os.write(writer, b"\n\n")
    os.close(writer)
    with EnterKey(reader) as terminal:
        assert [terminal.entered() for _ in range(3)] == [True, True, False] and terminal.over
    os.close(reader)


def test_a_keyboard_that_the_teleoperator_has_is_not_read(monkeypatch):
    reader, writer = os.pipe()
    os.write(writer, b"\n")

    def refused(end: int, size: int) -> bytes:
        raise OSError("a process in the background reads")

    with EnterKey(reader) as terminal, monkeypatch.context() as patch:
        patch.setattr(os, "read", refused)
        assert not terminal.entered() and not terminal.over
    for end in (reader, writer):
        os.close(end)


def report(*keys: str, source: str = "hold", reason: str = "", clipped: bool = False, captured: float = 0.0):
    record = SimpleNamespace(source=source, reason=reason, clipped=np.array([clipped]), captured=captured)
    return SimpleNamespace(record=record, keys=keys, stopped="")


class Reports:
    """Stands in for a control process: ``old`` was there before the question, ``later`` comes after it."""

    teleoperator_pid = 1

    def __init__(self, old, *later):
        self.old, self.later = old, list(later)

    def newest(self):
        return self.old

    def receive(self):
        return self.later.pop(0)


def test_the_teleoperator_answers_too_after_the_question(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setattr(EnterKey.__init__, "__defaults__", (reader,))
    show = Console(file=io.StringIO())
    control = Reports(report("ready"), report("success"), report("ready"), report())
    waiting(show)("Go?", control)
    assert show.file.getvalue() == "Go?\n" and len(control.later) == 1
    os.close(writer)
    control.teleoperator_pid = 0
    with pytest.raises(UserError, match="Nobody answers"):
        waiting(show)("Go?", control)
    os.close(reader)


def test_the_line_says_who_moves_the_arm_and_why_it_is_stopped():
    line = StatusLine(Console(file=io.StringIO()), "Episode 1 of 2")
    for step in range(4):
        record = report(source="human", reason="rate", clipped=step == 3, captured=0.04 * step).record
        line.update(record)
    assert line.text(record, "").plain == "Episode 1 of 2   human   clipped 25% (rate)   25.0 Hz"
    assert line.text(record, "a person pressed stop").plain.endswith("   STOPPED: a person pressed stop")


ENV = EnvConfig("so101", dict(BLIND))
ALWAYS = PersonConfig(patience=3, delay=2, hold=200, max_share=1.0)


def played(config: PersonConfig, seed: int = 3, seconds: float = 6.0):
    """What became of an episode in which the policy does nothing."""
    person = ScriptedPerson(ENV.make_expert().act, ENV.progress(), config)
    with closing(LockstepSession(simulated(seconds, **BLIND), OPEN_LOOP, person)) as session:
        return [one.record for one in session.play(hold_position, 1, seed)]


def test_a_person_who_sees_nothing_happen_does_the_task():
    records = played(ALWAYS)
    acted = [record.intervened for record in records]
    # Nothing new in the third step, two more until the hand, and the last of these is the first of the person's.
    assert acted[:5] == [False] * 5 and all(acted[6:])
    assert {record.source for record in records[6:]} == {"human"} and records[-1].outcome == "success"
    steps = np.diff([record.executed for record in records[6:]], axis=0)
    assert np.abs(steps[:, :5]).max() < 3.0 * 0.04 + 1e-9, "through the supervisor: 3 rad/s at most"


def test_the_hand_is_unsteady_and_follows_from_the_seed():
    one, other, steady = (played(config, seconds=0.6) for config in (ALWAYS, ALWAYS, replace(ALWAYS, noise=0.0)))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.executed, b.executed)
    assert any(not np.array_equal(a.executed, b.executed) for a, b in zip(one, steady, strict=False))


def test_control_comes_back_and_the_share_is_kept_over_episodes():
    config = PersonConfig(patience=3, delay=0, hold=4, max_share=0.2)
    person = ScriptedPerson(ENV.make_expert().act, ENV.progress(), config)
    with closing(LockstepSession(simulated(2.4, **BLIND), OPEN_LOOP, person)) as session:
        acted = [[one.record.intervened for one in session.play(hold_position, number, number)] for number in (1, 2)]
    assert 0.1 < np.mean(acted) <= 0.2
    for episode in acted:
        *whole, _ = [(who, len(list(steps))) for who, steps in itertools.groupby(episode)]
        interventions = [length for who, length in whole if who]
        assert len(interventions) >= 2 and min(interventions) >= 4


def test_by_command_a_person_watches_and_no_test_is_practised(monkeypatch):
    seen = []
    monkeypatch.setattr(drive, "drive", lambda config, settings, *_: seen.append(settings))
    for options in (["--person"], ["--server", "127.0.0.1:1", "--seed", "4"]):
        robot.robot(["run", "simulated", "--policy", "expert", "--episodes", "3", *options])
    robot.robot(["record", "simulated", "--policy", "expert"])
    assert [(one.scenes, one.person) for one in seen] == [
        ("test", True),
        ("reinforcement", False),
        ("demonstrations", False),
    ]
    tested, practised, shown = ({*drive._seeds(one)} for one in seen)
    assert not tested & practised and not practised & shown and min(tested) > max(practised)


def test_a_person_at_the_arm_is_counted():
    settings = drive.EpisodesConfig("", 1, 1, OPEN_LOOP, person=True)
    helped = drive.drive(simulated(3.0, **BLIND), settings, None, console)
    assert 0 < helped.intervened < helped.steps == 75
