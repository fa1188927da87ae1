"""``vla-rl robot`` with an SO-101 behind a real pseudo-terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from robot_drivers.config import Part, RobotConfig
from robot_drivers.feetech import GOAL_POSITION, TORQUE_ENABLE
from robot_drivers.simulated import SimulatedRobot
from tests.robot_drivers.servo_bus import Port, Servos
from vla_rl.cli import main
from vla_rl.contract.env import Observation
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.policies.function import FunctionPolicy

GOLDEN = Path(__file__).parents[1] / "robot_drivers" / "golden" / "so101.json"


@pytest.fixture
def port():
    with Port(Servos().answer) as port:
        yield port


@pytest.fixture
def file(port, tmp_path):
    options = {"port": port.path, "calibration": str(GOLDEN), "timeout_ms": 20_000.0, "control_hz": 10.0}
    RobotConfig(Part("robot_drivers.so101:SO101", options)).save(tmp_path / "arm.json")
    return tmp_path / "arm.json"


def moves(port: Port) -> list[bytes]:
    """Requests that write a goal, or switch torque on."""
    torque, goal = TORQUE_ENABLE.address, GOAL_POSITION.address
    written = [(one, one[5], one[6] if one[4] == 0x83 else one[3] - 3) for one in port.requests if one[4] in (3, 0x83)]
    return [
        one
        for one, first, count in written
        if first <= goal < first + count or (first == torque and any(one[6 if one[4] == 3 else 8 : -1]))
    ]


def test_check_prints_what_it_found_and_moves_nothing(file, port, capsys):
    main(["robot", "check", str(file), "--seconds", "0.4"])
    printed = capsys.readouterr().err
    for line in ("arm: so101: 6 joints at 10 Hz", "calibration: the servos hold", "answers: 4 of 4", "within limits"):
        assert line in printed
    assert "WRONG" not in printed
    assert len(port.requests) > 4 and moves(port) == []


def test_what_moves_an_arm_would_be_seen(file, port):
    arm = RobotConfig.load(file).open()
    arm.connect()
    assert moves(port) == []
    arm.command(arm.observe().position)
    arm.disconnect()  # answered, so what came before it has arrived
    assert len(moves(port)) >= 2  # torque, and a goal


def test_check_counts_what_is_wrong(file, complaint, capsys, tmp_path):
    other = tmp_path / "calibration.json"
    held = json.loads(GOLDEN.read_text())
    held["shoulder_pan"]["homing_offset"] += 5
    other.write_text(json.dumps(held))
    config = json.loads(file.read_text())
    config["driver"]["options"]["calibration"] = str(other)
    RobotConfig.from_json(config).replace(file)
    assert "1 of these must be mended" in complaint("robot", "check", str(file), "--seconds", "0.4")


def test_mistakes_are_one_sentence(complaint, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "did you mean 'check'?" in complaint("robot", "chek", "arm.json")
    assert "needs the robot's file" in complaint("robot", "check")
    assert "vla-rl robot setup" in complaint("robot", "check", str(tmp_path / "absent.json"))
    assert "Nobody answers" in complaint("robot", "setup", str(tmp_path / "arm.json"))
    assert not (tmp_path / "arm.json").exists()


def test_the_simulated_arm_is_recorded_and_the_dataset_read(tmp_path, capsys):
    out = tmp_path / "recorded"
    main(["robot", "record", "simulated", "--policy", "expert", "--episodes", "1", "--out", str(out)])
    printed = capsys.readouterr().err
    assert "success 100.0%" in printed and "of 1 (1 success)" in printed and str(out) in printed
    assert load_demonstrations(out).count == 1


def test_a_recorded_episode_is_done_again(tmp_path, capsys):
    out = tmp_path / "recorded"
    main(["robot", "record", "simulated", "--policy", "expert", "--episodes", "1", "--out", str(out)])
    main(["robot", "replay", "simulated", "--dataset", str(out), "--speed", "1"])
    printed = capsys.readouterr().err
    assert "the episode ended by success" in printed and "gripper.pos" in printed


def test_what_cannot_be_driven_is_one_sentence(complaint, file, tmp_path):
    assert "needs a policy" in complaint("robot", "run", "simulated")
    assert "no meta/info.json" in complaint("robot", "replay", "simulated", "--dataset", str(tmp_path))
    assert "choose a number from 0.01 to 1" in complaint("robot", "record", "simulated", "--speed", "-1")
    assert "vla-rl robot setup" in complaint("robot", "run", str(tmp_path / "absent.json"), "--policy", "expert")


def test_check_times_a_policy(capsys, tmp_path):
    policy = FunctionPolicy(SimulatedRobot().env_spec, still, f"{__name__}:still")
    policy.save_pretrained(tmp_path / "policy")
    main(["robot", "check", "simulated", "--seconds", "0.1", "--policy", str(tmp_path / "policy")])
    printed = capsys.readouterr().err
    assert "decision" in printed and "a chunk has 40 actions (1.60 s) and comes" in printed


def still(obs: Observation) -> np.ndarray:
    """[E,40,D]: stay."""
    return np.repeat(obs.state[:, None], 40, axis=1)
