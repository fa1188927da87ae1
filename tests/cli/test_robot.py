"""``vla-rl robot``: an SO-101 behind a real pseudo-terminal, and a person who types into one."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from robot_drivers.config import Part, RobotConfig
from robot_drivers.feetech import GOAL_POSITION, TORQUE_ENABLE
from robot_drivers.record import SOURCES
from robot_drivers.simulated import SimulatedRobot
from tests.docs.conftest import ROOT
from tests.patience import PATIENCE
from tests.robot_drivers.arms import LIMITS
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
    assert "needs FILE, for example vla-rl robot check my_arm.json" in complaint("robot", "check")
    assert "vla-rl robot setup" in complaint("robot", "check", tmp_path / "absent.json")
    assert "Nobody answers" in complaint("robot", "setup", tmp_path / "arm.json")
    assert not (tmp_path / "arm.json").exists()
    assert "needs a policy" in complaint("robot", "run", "simulated")
    assert "choose a number from 0.01 to 1" in complaint("robot", "record", "simulated", "--speed", "-1")
    assert "simulated in virtual time" in complaint("robot", "teleop", "simulated")


def test_an_episode_is_recorded_and_done_again(tmp_path, capsys):
    out = tmp_path / "recorded"
    main(["robot", "record", "simulated", "--policy", "expert", "--episodes", "1", "--out", str(out)])
    printed = capsys.readouterr().err
    assert "success 100.0%" in printed and "of 1 (1 success)" in printed and str(out) in printed
    assert load_demonstrations(out).count == 1
    main(["robot", "replay", "simulated", "--dataset", str(out), "--speed", "1"])
    printed = capsys.readouterr().err
    assert "the episode ended by success" in printed and "gripper.pos" in printed


def test_check_times_a_policy(capsys, tmp_path):
    policy = FunctionPolicy(SimulatedRobot().env_spec, still, f"{__name__}:still")
    policy.save_pretrained(tmp_path / "policy")
    main(["robot", "check", "simulated", "--seconds", "0.1", "--policy", str(tmp_path / "policy")])
    printed = capsys.readouterr().err
    assert "decision" in printed and "a chunk has 40 actions (1.60 s) and comes" in printed


def still(obs: Observation) -> np.ndarray:
    """[E,40,D]: stay."""
    return np.repeat(obs.state[:, None], 40, axis=1)


# -- one terminal with its teleoperator --------------------------------------------------------------------------------

ENTER, CTRL_C, ESCAPE = "\r", "\x03", "\x1b"

# What an interactive shell does with a program: a process group of its own, in front of the terminal until it ends.
SHELL = """
import os, signal, subprocess, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored in what a script starts in the background
os.open(sys.argv[1], os.O_RDWR)  # a new session's first terminal is its own
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
before = termios.tcgetattr(0)
unblocked = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTTOU})
job = subprocess.Popen(sys.argv[2:], process_group=0, preexec_fn=unblocked)
os.tcsetpgrp(0, job.pid)
_, status = os.waitpid(job.pid, os.WUNTRACED)  # a program that is suspended by the terminal is told as well
front, after = os.tcgetpgrp(0) == job.pid, termios.tcgetattr(0)
os.tcsetpgrp(0, os.getpgrp())
print("status", status if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status), "in front", front,
      "as it was", after == before, flush=True)
"""


class Shell:
    """A shell in a pseudo-terminal, and who sits before it."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = os.openpty()
        command = [sys.executable, "-c", SHELL, os.ttyname(theirs), sys.executable, "-m", "vla_rl.cli", *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=ROOT, env=env
        )
        os.close(theirs)
        self.shown, self._read = "", 0

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, *words: str) -> str:
        """What is shown until all ``words`` were, in any order, since the last call ended."""
        end = time.monotonic() + PATIENCE
        while not all(word in self.shown[self._read :] for word in words):
            assert time.monotonic() < end, f"{words} never came after:\n{self.shown}"
            self._look()
        new = self.shown[self._read :]
        self._read = len(self.shown)
        return new

    def end(self) -> str:
        """The last line: how the program ended and what it left."""
        return self.until("as it was True\r\n", "status").splitlines()[-1]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # the terminal hangs up, and everybody ends
        os.close(self._ours)
        self._process.wait()

    def _look(self) -> None:
        if select.select([self._ours], [], [], 0.1)[0]:
            try:
                self.shown += os.read(self._ours, 4096).decode(errors="replace")
            except OSError:  # nobody has the terminal any more
                raise AssertionError(f"it has ended:\n{self.shown}") from None


@pytest.fixture
def shell():
    opened = []

    def start(*words: str) -> Shell:
        opened.append(Shell(*words))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def keyed(tmp_path: Path) -> Path:
    """An arm in another process that is where it is sent, driven by the keys of the terminal."""
    arm = Part("tests.robot_drivers.arms:FileArm", {"path": str(tmp_path / "commands.txt")})
    keyboard = Part("robot_drivers.teleop.keyboard:Keyboard", {"joints": 2, "speed": 0.2, "pulse": 1e9})
    RobotConfig(arm, teleoperator=keyboard, limits=LIMITS.to_json(), tasks=("lift",), seconds=1e4).save(
        tmp_path / "arm.json"
    )
    return tmp_path / "arm.json"


def test_episodes_are_recorded_by_the_keys_of_one_terminal(shell, keyed, tmp_path):
    """Enter begins, space takes over, a digit moves, s keeps, r plays again; the terminal is the shell's at the end."""
    out = tmp_path / "recorded"
    person = shell("robot", "record", str(keyed), "--episodes", "2", "--out", str(out))
    person.until("Episode 1 of 2: prepare the scene, then press Enter", "space takes over")
    person.type(ENTER)
    person.until("Episode 1 of 2", "hold")
    person.type(" 1")
    person.until("human")
    person.type("s")
    person.until("Episode 1 of 2: success", "Episode 2 of 2: prepare")
    person.type(ENTER)
    person.until("Episode 2 of 2", "human")
    person.type("r")
    person.until("Episode 2 of 2: redo", "Episode 2 of 2: prepare")
    person.type(ENTER)
    person.until("Episode 2 of 2", "human")
    person.type(" ")
    person.until("hold")
    person.type("f")
    person.until("Episode 2 of 2: failure", "of 2 (")
    assert person.end().startswith("status 0 in front True")
    episodes = load_demonstrations(out)
    assert episodes.count == 2
    (_, first), (_, second) = episodes.spans()
    assert episodes.extras["next.success"].tolist() == [step == first - 1 for step in range(second)]
    person_s = episodes.extras["intervention"]
    assert not person_s[0] and person_s[first - 1] and person_s[first] and not person_s[second - 1]
    assert SOURCES.index("human") in episodes.extras["complementary_info.source"][:first]
    assert episodes.action[first - 1, 0] > episodes.action[0, 0] == 0.0


def test_a_stopped_arm_is_re_armed_and_ctrl_c_restores_all(shell, keyed, tmp_path):
    person = shell("robot", "record", str(keyed), "--out", str(tmp_path / "recorded"))
    person.until("Episode 1 of 50: prepare", "space takes over")
    person.type(ENTER)
    person.until("Episode 1 of 50", "hold")
    person.type(" 1")
    person.until("human")
    person.type(ESCAPE)
    person.until("STOPPED: a person pressed stop")
    person.type("s")
    person.until("Episode 1 of 50: success", "with the arm stopped", "The arm is stopped: a person pressed stop.")
    person.type(ENTER)
    assert "is stopped" not in person.until("Episode 2 of 50: prepare")
    person.type(CTRL_C)
    person.until("stopped with 1 episodes recorded")
    assert person.end().startswith("status 130 in front True")
    assert load_demonstrations(tmp_path / "recorded").count == 1


@pytest.mark.full
def test_a_person_drives_without_recording(shell, keyed, tmp_path):
    person = shell("robot", "teleop", str(keyed), "--speed", "0.5")
    person.until("Ctrl-C ends it", "space takes over", "hold")
    person.type(" 1")
    person.until("human")
    person.type(ESCAPE)
    person.until("STOPPED: a person pressed stop")
    person.type(CTRL_C)
    person.until("the arm was brought to rest, and nothing was recorded")
    assert person.end().startswith("status 130 in front True")
    lifts = [float(line.split()[1]) for line in (tmp_path / "commands.txt").read_text().splitlines()[:-1]]
    assert lifts[0] == 0.0 and 0 < max(lifts) <= 2.0 and (tmp_path / "commands.txt").read_text().endswith("end\n")


def test_a_teleoperator_that_cannot_be_read_is_said(complaint, keyed, tmp_path):
    config = json.loads(keyed.read_text())
    config["teleoperator"]["options"]["terminal"] = "/no/such/tty"
    RobotConfig.from_json(config).replace(keyed)
    said = complaint("robot", "record", str(keyed), "--out", str(tmp_path / "recorded"))
    assert "'/no/such/tty' is no terminal here" in said and "the arm is held" in said
