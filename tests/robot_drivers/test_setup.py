"""The dialogue that writes a robot's file: everything is asked for, Enter is an answer, a mistake is asked again."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from robot_drivers import setup as routine
from robot_drivers.check import check_robot
from robot_drivers.config import ARMS, CAMERAS, TELEOPERATORS, RobotConfig
from robot_drivers.limits import Box
from robot_drivers.setup import FoundCamera, plugged_cameras
from tests.robot_drivers.servo_bus import Port, Servos
from vla_rl.contract.errors import UserError
from vla_rl.contract.load import load

FOUND = [FoundCamera(0, 640, 480, 30.0), FoundCamera(2, 1280, 720, 15.0)]
REST = ("", "", "", "")  # tasks, seconds, speed, workspace


class Person:
    """Answers one question after the other; ``asked`` keeps the questions."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), list[str]()

    def __call__(self, sentence: str) -> str:
        self.asked.append(sentence)
        return self.answers.pop(0)

    def asked_after(self, start: str) -> str:
        """The question that followed the one that begins so."""
        return self.asked[next(i for i, one in enumerate(self.asked) if one.startswith(start)) + 1]


@pytest.fixture
def ports(monkeypatch):
    """Two serial ports are plugged in."""
    found = {"/dev/ttyACM0": "USB", "/dev/ttyACM1": "USB"}
    monkeypatch.setitem(routine.DEVICES, "port", lambda: found)


def written(path, person, cameras=()):
    config = routine.setup(path, person, lambda: list(cameras))
    assert person.answers == [] and RobotConfig.load(path) == config
    return config


def test_everything_that_a_file_holds_is_asked_for(tmp_path, ports):
    arm = ["so101", "/dev/ttyACM1", "left", "", "50", "", "no"]
    cameras = ["", "240", "320", "", "", "", "2", "", "", "", "MJPG", "scene", "/tmp/film.avi", "", "", "", "", "", ""]
    leader = ["leader", "", "right", "", "", ""]
    rest = ["pick up the cube", "open the drawer", "", "12.5", "0.5", "-0.2, -0.3, 0, 0.4, 0.3, 0.4"]
    person = Person(*arm, *cameras, *leader, *rest)
    config = written(tmp_path / "arm.json", person, FOUND)
    file = json.loads((tmp_path / "arm.json").read_text())
    assert file["driver"] == {
        "name": "robot_drivers.so101:SO101",
        "options": {"port": "/dev/ttyACM1", "id": "left", "control_hz": 50, "disable_torque_on_disconnect": False},
    }
    assert {name: camera["options"] for name, camera in file["cameras"].items()} == {
        "front": {"index": 0, "height": 240, "width": 320},
        "scene": {"index": 2, "height": 720, "width": 1280, "fps": 15.0, "fourcc": "MJPG"},
        "wrist": {"index": "/tmp/film.avi"},
    }
    assert file["teleoperator"]["options"] == {"port": "/dev/ttyACM0", "id": "right"}
    assert file["tasks"] == ["pick up the cube", "open the drawer"] and file["seconds"] == 12.5
    whole, limits = config.open().spec, config.limits_of(config.open())
    assert limits.workspace == Box((-0.2, -0.3, 0.0), (0.4, 0.3, 0.4)) and config.chain() is not None
    assert [joint.velocity for joint in limits.joints] == [joint.velocity / 2 for joint in whole.joints]
    cameras_asked = [one for one in person.asked if " camera? " in one]
    assert "Found: 0 (640x480 at 30/s), 2 (1280x720 at 15/s)." in cameras_asked[0] and "(Enter: 0)" in cameras_asked[0]
    assert "Found: 2 (1280x720 at 15/s)." in cameras_asked[1] and "Found" not in cameras_asked[2]


def test_enter_is_an_answer_everywhere(tmp_path, ports):
    person = Person(*[""] * 7, "", *[""] * 4, *REST)
    config = written(tmp_path / "arm.json", person)
    assert config == RobotConfig.from_json(
        {
            "driver": {"name": "robot_drivers.so101:SO101", "options": {"port": "/dev/ttyACM0"}},
            "teleoperator": {"name": "robot_drivers.teleop.keyboard:Keyboard"},
        }
    )
    before = (tmp_path / "arm.json").read_bytes()
    with pytest.raises(UserError, match="not overwritten"):
        routine.setup(tmp_path / "arm.json", Person())
    assert (tmp_path / "arm.json").read_bytes() == before


def test_what_is_plugged_in_is_offered_once(tmp_path, ports):
    person = Person(*[""] * 7, "none", "leader", *[""] * 5, *REST)
    config = written(tmp_path / "arm.json", person)
    assert config.teleoperator is not None and config.teleoperator.options["port"] == "/dev/ttyACM1"
    assert person.asked_after("Which arm?") == (
        "port? Plugged in: /dev/ttyACM0 (USB), /dev/ttyACM1 (USB). (Enter: '/dev/ttyACM0')"
    )
    assert person.asked_after("What does a person").startswith("port? Plugged in: /dev/ttyACM1 (USB). (Enter")


def test_a_mistake_is_said_and_asked_again(tmp_path, monkeypatch):
    monkeypatch.setitem(routine.DEVICES, "port", dict)
    arm = ["so100", "nowhere:Arm", "so101", "", "/dev/null", "", "", "fast", "", "", "maybe", ""]
    cameras = ["opencw", "0", *[""] * 4, "not a name", "front", "1", *[""] * 4, "front", "side", "none"]
    teleoperator = ["keybord", "keyboard", "9", "", "", "none"]  # which moves seven joints at most
    rest = ["", "-3", "10", "7", "", "1 2 3", "1 1 1 0 0 0", ""]
    person = Person(*arm, *cameras, *teleoperator, *rest)
    config = written(tmp_path / "arm.json", person)
    assert config.seconds == 10 and config.teleoperator is None and set(config.cameras) == {"front", "side"}
    wrong = [one.partition("\n")[0] for one in person.asked if "\n" in one]
    for said, says in zip(
        wrong,
        [
            "did you mean 'so101'?",
            "No module named 'nowhere'",
            "is needed",
            "control_hz is a number, and 'fast' is none",
            "'maybe' is neither yes nor no",
            "did you mean 'opencv'?",
            "cannot name a camera",
            "a camera 'front' already",
            "did you mean 'keyboard'?",
            "joints=9, but the keyboard moves 1 to 7",
            "'-3' is no number from 1 to 3600",
            "'7' is no number from 0.01 to 1",
            "not six numbers",
            "is empty",
        ],
        strict=True,
    ):
        assert says in said


def test_an_arm_of_ones_own_has_its_own_kinematics(tmp_path):
    own = "tests.robot_drivers.test_check:Arm"
    answers = [own, "", "", "none", "none", "", "", "", "robot_drivers.kinematics:so101", "json:JSONDecoder", ""]
    person = Person(*answers)
    config = written(tmp_path / "arm.json", person)
    assert config.driver.name == own and config.kinematics == "" and config.limits is None
    assert "The kinematics have the joints" in person.asked[-2] and "makes no Chain" in person.asked[-1]


@pytest.mark.parametrize("name", [*CAMERAS.values(), *TELEOPERATORS.values(), *ARMS.values()])
def test_all_that_can_be_chosen_exists(name):
    assert load(name)


def test_cameras_are_found_that_give_a_picture(tmp_path):
    film, text = tmp_path / "film.avi", tmp_path / "text.avi"
    writer = cv2.VideoWriter(str(film), cv2.VideoWriter.fourcc(*"MJPG"), 25.0, (48, 32))
    writer.write(np.zeros((32, 48, 3), np.uint8))
    writer.release()
    text.write_text("no film")
    assert plugged_cameras([str(text), str(film)]) == [FoundCamera(str(film), 48, 32, 25.0)]


def test_the_dialogue_writes_a_file_that_check_accepts(tmp_path, monkeypatch):
    """With the servos of arm and leader behind two pseudo-terminals."""
    monkeypatch.setitem(routine.DEVICES, "port", dict)
    golden = str(Path(__file__).parent / "golden" / "so101.json")
    with Port(Servos().answer) as arm, Port(Servos().answer) as leader:
        person = Person(
            *("so101", arm.path, "", golden, "10", "20000", ""),
            "none",
            *("leader", leader.path, "", golden, "''", "20000"),
            *("pick up the cube", "", "5", "0.25", ""),
        )
        findings = {one.name: one for one in check_robot(written(tmp_path / "arm.json", person), 0.2)}
    timed = {"rate", "time stamps", "teleoperator"}  # of whatever else this computer does
    assert [str(one) for name, one in findings.items() if not one.good and name not in timed] == []
    assert findings["its joints"].result == "6 positions, as the arm has" and timed <= set(findings)
