"""A scripted person at a simulated arm: rescues it late, steers it through the supervisor, and is recorded as human."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace

import numpy as np

from tests.recipes.robots.test_robot_recording import OPEN_LOOP, OPTIONS, simulated
from vla_rl.cli import robot
from vla_rl.experience.intervention import PersonConfig
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.decide import hold_position
from vla_rl.recipes.robots.person import ScriptedPerson
from vla_rl.recipes.robots.session import LockstepSession
from vla_rl.recipes.terminal import console

ENV = EnvConfig("so101", dict(OPTIONS))
ALWAYS = PersonConfig(patience=3, delay=2, hold=200, max_share=1.0)


def played(config: PersonConfig, seed: int = 3, seconds: float = 6.0):
    """What became of an episode in which the policy does nothing."""
    person = ScriptedPerson(ENV.make_expert().act, ENV.progress(), config)
    with closing(LockstepSession(simulated(seconds=seconds), OPEN_LOOP, person)) as session:
        return [one.record for one in session.play(hold_position, 1, seed)], person


def test_a_person_who_sees_nothing_happen_does_the_task_and_it_is_said():
    records, person = played(ALWAYS)
    acted = [record.intervened for record in records]
    # Nothing new in the third step, two more until the hand, and the last of these is the first of the person's.
    assert acted[:5] == [False] * 5 and all(acted[6:])
    assert {record.source for record in records[6:]} == {"human"} and records[-1].outcome == "success"
    steps = np.diff([record.executed for record in records[6:]], axis=0)
    assert np.abs(steps[:, :5]).max() < 3.0 * 0.04 + 1e-9, "through the supervisor: 3 rad/s at most"
    assert person.share > 0.5


def test_the_hand_is_unsteady_and_the_same_seed_gives_the_same_episode():
    one, other, steady = (played(config)[0] for config in (ALWAYS, ALWAYS, replace(ALWAYS, noise=0.0)))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.executed, b.executed)
    assert any(not np.array_equal(a.executed, b.executed) for a, b in zip(one, steady, strict=False))


def test_control_comes_back_and_the_share_is_kept_over_episodes():
    config = PersonConfig(patience=3, delay=0, hold=4, max_share=0.2)
    person = ScriptedPerson(ENV.make_expert().act, ENV.progress(), config)
    with closing(LockstepSession(simulated(seconds=4.0), OPEN_LOOP, person)) as session:
        acted = [[one.record.intervened for one in session.play(hold_position, number, number)] for number in (1, 2)]
    assert 0.1 < np.mean(acted) <= 0.2 and 0.1 < person.share <= 0.2
    for episode in acted:
        *whole, _ = [(who, len(list(steps))) for who, steps in itertools.groupby(episode)]
        interventions = [length for who, length in whole if who]
        assert len(interventions) >= 2 and min(interventions) >= 4


def test_by_command_a_person_watches_and_what_a_server_gets_is_of_no_test(monkeypatch):
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


def test_a_person_at_the_arm_raises_its_success():
    settings = drive.EpisodesConfig("", 2, 1, OPEN_LOOP)
    alone, helped = (drive.drive(simulated(), replace(settings, person=who), None, console) for who in (False, True))
    assert alone.intervened == 0 and alone.outcomes["success"] == 0 < helped.intervened
