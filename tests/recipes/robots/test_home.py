"""Before an episode an arm goes home: slowly, when a person lets it, and who stopped it on the way is heard."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from robot_drivers.config import Part, RobotConfig
from tests.robot_drivers.arms import LIMITS
from vla_rl.cli import robot
from vla_rl.contract.errors import UserError
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.session import dry, open_session

OPEN_LOOP, HORIZON = drive.execution("open_loop", 8, 1.0), drive.execution("receding_horizon", 8, 1.0)
HOME = (0.15, 0.6)


@pytest.fixture
def arm(tmp_path):
    """An arm in another process, at [0, .5], that writes every command to the file "sent"."""
    part = Part("tests.robot_drivers.arms:FileArm", {"path": str(tmp_path / "sent")})
    return RobotConfig(part, limits=LIMITS.to_json(), home=HOME)


def prepared(config, execution=OPEN_LOOP, meanwhile=lambda control: None):
    """What the person was told before an episode, where the arm was each time, and where it was in the end."""
    told, places = [], []

    def wait(sentence, control):
        told.append(sentence)
        places.append(control.receive().record.position)
        meanwhile(control)

    with closing(open_session(config, execution, wait)) as session:
        session.prepare("Episode 1")
        last = session._control.receive().record.position
        session.prepare("Episode 2")
    return told, places, last


@pytest.mark.parametrize("execution", [OPEN_LOOP, HORIZON], ids=["open loop", "receding horizon"])
def test_it_goes_home_slowly_once_a_person_has_pressed_enter(arm, execution, tmp_path):
    told, places, last = prepared(arm, execution)
    assert told[0].startswith("Episode 1: the arm goes home") and places[0].tolist() == [0.0, 0.5]
    assert told[1:] == [f"Episode {n}: prepare the scene, then press Enter." for n in (1, 2)]  # it is home already
    np.testing.assert_allclose([places[1], last, places[2]], [HOME] * 3, atol=5e-3)
    sent = np.array([line.split() for line in (tmp_path / "sent").read_text().splitlines()[:-1]], float)
    underway = sent[(sent[:, 1] > 1e-4) & (sent[:, 1] < 0.145)]
    assert underway[-1, 0] - underway[0, 0] > 0.25  # at full speed .15 s; .15 rad at a quarter of 2 rad/s are .3 s


def test_an_arm_that_does_not_arrive_is_named(arm):
    stuck = replace(arm, driver=Part("tests.robot_drivers.arms:StuckArm", arm.driver.options))
    told, places, _ = prepared(stuck)
    assert told[1] == "gripper is -0.1 from home, where the arm came to rest. Look at it; Enter goes on from there."
    assert told[2].startswith("Episode 1: prepare") and places[2].tolist() == [0.0, 0.5]


def test_an_arm_that_is_stopped_on_its_way_goes_on_when_armed(arm):
    stops = iter([True])

    def press(control):
        if next(stops, False):
            control.stop("a hand was in the way")

    told, places, _ = prepared(arm, meanwhile=press)
    assert "a hand was in the way" in told[1] and "re-arms" in told[1]
    assert told[2].startswith("Episode 1: the arm goes home") and told[3].startswith("Episode 1: prepare")
    np.testing.assert_allclose(places[3], HOME, atol=5e-3)


def test_a_dry_arm_and_one_without_a_home_stay(arm, tmp_path):
    assert dry(arm).home is None
    told, _, last = prepared(replace(arm, home=None))
    assert len(told) == 2 and last.tolist() == [0.0, 0.5]


def test_home_is_written_where_the_arm_is(arm, tmp_path, capsys):
    path = tmp_path / "arm.json"
    replace(arm, home=None).save(path)
    robot.robot(["home", str(path)])
    assert "home is where the arm is: lift 0, gripper 0.5" in capsys.readouterr().err
    assert RobotConfig.load(path) == replace(arm, home=(0.0, 0.5))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["arm.json", "sent"]
    assert (tmp_path / "sent").read_text() == "end\n"  # nothing moved


@pytest.mark.parametrize(
    ("home", "says"),
    [
        ([0.1], "home has 1 positions, but toy has 2 joints"),
        ([0.1, 1.5], "home has gripper at 1.5, outside its limits 0 to 1"),
        ([float("nan"), 0.5], "home has lift at nan, outside its limits"),
        ("up", "home is 'up', so the arm would not know"),
        ([0.1, "half"], "home is .0.1, 'half'., so the arm"),
    ],
)
def test_a_home_that_the_arm_cannot_have_is_refused(arm, home, says, tmp_path):
    value = json.loads(json.dumps(arm.to_json())) | {"home": home}
    with pytest.raises(UserError, match=says):
        open_session(RobotConfig.from_json(value), OPEN_LOOP, lambda *_: None)
    assert not (tmp_path / "sent").exists() or not (tmp_path / "sent").read_text()
