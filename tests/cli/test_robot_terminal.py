"""``vla-rl robot`` in one terminal with its teleoperator: a person types into a real pseudo-terminal."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from robot_drivers.config import Part, RobotConfig
from robot_drivers.record import SOURCES
from tests.docs.conftest import ROOT
from tests.patience import PATIENCE
from tests.robot_drivers.arms import LIMITS
from vla_rl.experience.datasets import load_demonstrations

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
def file(tmp_path: Path) -> Path:
    """An arm in another process that is where it is sent, driven by the keys of the terminal."""
    arm = Part("tests.robot_drivers.arms:FileArm", {"path": str(tmp_path / "commands.txt")})
    keyboard = Part("robot_drivers.teleop.keyboard:Keyboard", {"joints": 2, "speed": 0.2, "pulse": 1e9})
    RobotConfig(arm, teleoperator=keyboard, limits=LIMITS.to_json(), tasks=("lift",), seconds=1e4).save(
        tmp_path / "arm.json"
    )
    return tmp_path / "arm.json"


def test_episodes_are_recorded_by_the_keys_of_one_terminal(shell, file, tmp_path):
    """Enter begins, space takes over, a digit moves, s keeps, r plays again; the terminal is the shell's at the end."""
    out = tmp_path / "recorded"
    person = shell("robot", "record", str(file), "--episodes", "2", "--out", str(out))
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


def test_a_stopped_arm_is_re_armed_by_the_person_and_ctrl_c_leaves_the_terminal_as_it_was(shell, file, tmp_path):
    person = shell("robot", "record", str(file), "--out", str(tmp_path / "recorded"))
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


def test_a_person_drives_without_recording(shell, file, tmp_path):
    person = shell("robot", "teleop", str(file), "--speed", "0.5")
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


def test_nobody_can_drive_without_a_teleoperator_or_in_virtual_time(complaint, file):
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "teleoperator": None}))
    assert "names no teleoperator" in complaint("robot", "teleop", str(file))
    assert "simulated in virtual time" in complaint("robot", "teleop", "simulated")


def test_a_teleoperator_that_cannot_be_read_ends_it_in_one_sentence(complaint, file, tmp_path):
    config = json.loads(file.read_text())
    config["teleoperator"]["options"]["terminal"] = "/no/such/tty"
    RobotConfig.from_json(config).replace(file)
    said = complaint("robot", "record", str(file), "--out", str(tmp_path / "recorded"))
    assert "'/no/such/tty' is no terminal here" in said and "the arm is held" in said
