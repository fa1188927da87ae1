"""Episodes on an arm: home before each, a stop that only a person ends, and a dry run in which nothing is sent."""

from __future__ import annotations

import io
import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from robot_drivers.config import Part, RobotConfig
from robot_drivers.driver import DryRun
from robot_drivers.record import Decision, Query
from robot_drivers.runtime import ControlProcess
from tests.recipes.robots.arms import BLIND, HORIZON, OPEN_LOOP, file_arm, in_real_time, simulated
from tests.robot_drivers.arms import ARM, LIMITS
from tests.robot_drivers.simulated_robot import SimulatedProcess
from vla_rl.cli import robot
from vla_rl.contract.errors import UserError
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.drive import episode_of, hold_position
from vla_rl.recipes.robots.session import DrySession, LockstepSession, RealTimeSession, dry, open_session

HOME = (0.15, 0.6)


def nobody(sentence: str, control: ControlProcess) -> None:
    """Presses Enter at once."""


@pytest.fixture
def arm(tmp_path):
    """An arm that writes every command to the file "sent"."""
    return file_arm(tmp_path / "sent", home=HOME)


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


def test_it_goes_home_slowly_once_a_person_has_pressed_enter(arm, tmp_path):
    told, places, last = prepared(arm, HORIZON)
    assert told[0].startswith("Episode 1: the arm goes home") and places[0].tolist() == [0.0, 0.5]
    assert told[1:] == [f"Episode {n}: prepare the scene, then press Enter." for n in (1, 2)]  # it is home already
    np.testing.assert_allclose([places[1], last, places[2]], [HOME] * 3, atol=5e-3)
    sent = np.array([line.split() for line in (tmp_path / "sent").read_text().splitlines()[:-1]], float)
    underway = sent[(sent[:, 1] > 1e-4) & (sent[:, 1] < 0.145)]
    assert underway[-1, 0] - underway[0, 0] > 0.25  # at full speed .15 s; .15 rad at a quarter of 2 rad/s are .3 s


def test_an_arm_that_does_not_arrive_is_named(tmp_path):
    told, places, _ = prepared(file_arm(tmp_path / "sent", "StuckArm", home=HOME))
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
        open_session(RobotConfig.from_json(value), OPEN_LOOP, nobody)
    assert not (tmp_path / "sent").exists() or not (tmp_path / "sent").read_text()


def test_a_stop_that_nobody_could_end_ends_the_episode(tmp_path):
    asked = []
    config = file_arm(tmp_path / "sent", seconds=1e4)
    with closing(RealTimeSession(config, OPEN_LOOP, lambda sentence, control: asked.append(sentence))) as session:
        session.prepare("Episode 1 of 2")
        steps = session.play(hold_position, 1, 0)
        next(steps)
        session._control.stop("the cable came loose")
        last = list(steps)[-1]
        assert last.record.outcome == "stopped" and last.stopped == "the cable came loose"
        session.prepare("Episode 2 of 2")
        assert not session._control.newest().stopped
    assert asked == [
        "Episode 1 of 2: prepare the scene, then press Enter.",
        "The arm is stopped: the cable came loose. Look at it; Enter re-arms it.",
        "Episode 2 of 2: prepare the scene, then press Enter.",
    ]
    with closing(LockstepSession(simulated(**BLIND), OPEN_LOOP)) as lockstep:
        lockstep._executor.stop("the measurement jumped")
        with pytest.raises(UserError, match=r"before Episode 2 of 2 \(the measurement jumped\)"):
            lockstep.prepare("Episode 2 of 2")


@pytest.mark.parametrize(("milliseconds", "steps"), [(0, 0), (80, 2), (81, 3)])
def test_a_delay_of_the_policy_lasts_whole_control_steps(milliseconds: float, steps: int):
    asked: list[Query] = []

    def decide(query: Query) -> Decision:
        asked.append(query)
        return Decision(np.repeat(np.asarray(query.obs.state, np.float64), 4, axis=0))

    execution = drive.execution("receding_horizon", 4, 1.0, milliseconds / 1000)
    with closing(LockstepSession(simulated(0.4, **BLIND), execution)) as session:
        seen = list(session.play(decide, 1, 7))
    sources = [one.record.source for one in seen]
    assert sources.index("policy") == steps and {query.delay for query in asked} == {steps}
    assert seen[steps].record.latency == pytest.approx(steps * 0.04)


def test_the_same_in_real_time_with_an_arm_that_is_a_process():
    """Nothing but the file differs: the arm holds where it is while nobody takes over, and the time limit ends it."""
    with SimulatedProcess(robot={"options": {"image_size": 16, "threads": 1, "seconds": 600}}) as process:
        config = in_real_time(process.address, tasks=("wait",), seconds=0.4)
        camera = Part("robot_drivers.simulated_process:SimulatedCamera", {**config.driver.options, "camera": "front"})
        with closing(open_session(replace(config, cameras={"front": camera}), OPEN_LOOP, nobody)) as session:
            assert isinstance(session, RealTimeSession) and isinstance(session._control, ControlProcess)
            seen = list(session.play(hold_position, 1, 3))
        episode = episode_of(seen, session.spec, 3)
    assert seen[-1].record.outcome == "time_limit" and len(seen) == 10
    assert episode.images["front"].shape == (10, 16, 16, 3) and episode.images["front"].any()
    assert np.abs(episode.state - episode.state[0]).max() < 0.2 and episode.tasks == ("wait",)


# -- a dry run ---------------------------------------------------------------------------------------------------------


def lift(query: Query) -> Decision:
    """Half of a radian higher at once, which the supervisor does not allow."""
    return Decision(np.repeat(np.asarray(query.obs.state, np.float64) + np.array([0.5, 0.0]), 8, axis=0))


def test_an_arm_is_sent_nothing_and_every_command_is_a_line(arm, tmp_path):
    printed = io.StringIO()
    config = dry(replace(arm, tasks=("lift",), seconds=0.4))
    assert config.home is None
    with closing(open_session(config, OPEN_LOOP, nobody)) as session:
        assert isinstance(session, DrySession) and session.spec.action.names == ARM.names
        session.prepare("Episode 1")
        with session.display(Console(file=printed, width=60), 1) as display:
            seen = []
            for step in session.play(lift, 1, 0):
                seen.append(step)
                display.step("Episode 1", step.record, step.stopped)
            display.ended("Episode 1", [one.record for one in seen], 1, 0)
    assert (tmp_path / "sent").read_text() == "end\n"
    decided = [one.record for one in seen if one.record.source == "policy"]
    assert decided and all(one.record.position.tolist() == [0.0, 0.5] for one in seen)
    assert 0 < decided[-1].executed[0] <= LIMITS.joints[0].lead + 1e-9  # it stays near an arm that does not follow
    lines = printed.getvalue().splitlines()
    assert len(lines) == len(seen) + 1
    assert lines[-1].endswith(f"over after {len(seen)} commands, none of which was sent")
    line = next(line for line, one in zip(lines, seen, strict=False) if one.record is decided[-1])
    assert "policy" in line and f"lift {decided[-1].executed[0]:+.3f} [+0.500]" in line and "gripper +0.500 " in line


def test_a_dry_arm_is_that_arm_but_prepares_and_judges_nothing():
    driver = DryRun("robot_drivers.simulated:SimulatedRobot", {"options": BLIND})
    assert driver.spec.name == "so101" and not driver.is_connected
    assert not hasattr(driver, "reset") and not hasattr(driver, "outcome")


def test_a_dry_run_claims_no_success(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drive, "waiting", lambda show: nobody)
    file_arm(tmp_path / "sent", seconds=0.4).save(tmp_path / "arm.json")
    monkeypatch.setattr(drive, "build_decider", lambda *_: lift)
    robot.robot(["run", str(tmp_path / "arm.json"), "--policy", "mine", "--episodes", "1", "--dry-run"])
    printed = capsys.readouterr().err
    assert "of 20 commands were clipped; none was sent to the arm" in printed and "success" not in printed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "time, which passes by commands, so nothing would happen"),
        (("--out", "out"), "there is nothing to record; leave --out or --dry-run out"),
        (("--server", "127.0.0.1:1"), "nothing to send; leave --server or --dry-run out"),
    ],
)
def test_what_a_dry_run_cannot_do_is_one_sentence(options, says):
    with pytest.raises(UserError, match=says):
        robot.robot(["run", "simulated", "--policy", "expert", "--dry-run", *options])
