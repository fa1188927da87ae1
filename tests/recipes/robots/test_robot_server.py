"""A policy server in place of a local policy: the same control steps, and an arm that holds when the server fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from robot_drivers.config import Part, RobotConfig
from robot_drivers.limits import Limits
from robot_drivers.simulated import SimulatedRobot
from tests.patience import PATIENCE
from tests.recipes.robots.openpi_process import ACTIONS
from tests.robot_drivers.arms import LIMITS
from tests.robot_drivers.test_control import STEP, WATCHDOG, commands, ended, moving, wait_until
from tests.serving.served import serving_openpi
from vla_rl.cli import main
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.drive import PolicyDecider
from vla_rl.recipes.robots.session import LockstepSession, open_session

OPTIONS = {"image_size": 16, "threads": 1}
LAYOUT = "?layout=tests.recipes.robots.openpi_process:joints"
MOVING = 2 * ACTIONS + WATCHDOG  # commands at most: of a chunk that is executed and one that is on its way
CHUNKS = drive.execution("receding_horizon", 8, 1.0)


def leaning(obs: Observation) -> np.ndarray:
    """[E,6,D]: every joint a little on, the more the brighter the picture."""
    on = 0.01 * obs.images["front"].mean() / 255
    return obs.state[:, None] + on * np.arange(1, 7, dtype=np.float32)[:, None]


def simulated(seconds: float = 1.0) -> RobotConfig:
    arm = {"options": OPTIONS}
    limits = Limits.of(SimulatedRobot(**arm).spec, margin=0.0).to_json()
    return RobotConfig(Part("robot_drivers.simulated:SimulatedRobot", arm), limits=limits, seconds=seconds)


def executed(policy: str) -> np.ndarray:
    """[T,D], what the simulated arm was sent in one episode."""
    config, settings = simulated(), drive.EpisodesConfig(policy, 1, 1, CHUNKS)
    with closing(LockstepSession(config, CHUNKS)) as session, drive._deciding(session, config, settings) as decide:
        return np.stack([step.record.executed for step in session.play(decide, 1, 7)])


def test_a_server_drives_an_arm_as_its_policy_does_here(tmp_path):
    policy = FunctionPolicy(SimulatedRobot(options=OPTIONS).env_spec, leaning, f"{__name__}:leaning")
    policy.save_pretrained(tmp_path / "policy")
    local = executed(str(tmp_path / "policy"))
    with serving_openpi(policy) as server:
        remote = executed(server.url)
    assert np.ptp(local, axis=0).max() > 0.01
    np.testing.assert_array_equal(remote, local)


def test_the_command_takes_an_address_that_has_to_answer(complaint, capsys, tmp_path):
    policy = FunctionPolicy(SimulatedRobot().env_spec, leaning, f"{__name__}:leaning")
    simulated(0.4).save(tmp_path / "arm.json")
    with serving_openpi(policy) as server:
        main(["robot", "run", str(tmp_path / "arm.json"), "--policy", server.url, "--episodes", "1"])
        assert "of 1 (1 time_limit)" in capsys.readouterr().err
        address = server.url
        assert "without a velocity field" in complaint(
            "robot", "run", "simulated", "--policy", address, "--real-time", "vjp"
        )
    assert "no policy server answers" in complaint("robot", "run", "simulated", "--policy", address)


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """Address and process of a policy server."""
    command = [sys.executable, "-m", "tests.recipes.robots.openpi_process"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        process.kill()


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, "so nothing more is exchanged with it"),
        (signal.SIGSTOP, "so nothing more is exchanged with it"),  # it is killed afterwards
        (signal.SIGUSR1, "an action that is not finite"),
    ],
    ids=["killed", "hangs", "nonsense"],
)
def test_when_the_server_fails_in_mid_episode_the_arm_holds(server, number, says, tmp_path: Path):
    path, (address, pid) = tmp_path / "commands", server
    arm = Part("tests.robot_drivers.arms:FileArm", {"path": str(path)})
    config = RobotConfig(arm, limits=LIMITS.to_json(), tasks=("lift",), seconds=PATIENCE)
    settings = drive.EpisodesConfig(address + LAYOUT, 1, 1, CHUNKS)
    said: list[str] = []

    def play() -> None:
        with (
            closing(open_session(config, CHUNKS, lambda sentence: "")) as session,
            drive._deciding(session, config, settings) as decide,
        ):
            try:
                for _ in session.play(decide, 1, 7):
                    pass
            except UserError as error:
                said.append(str(error))

    playing = threading.Thread(target=play)
    playing.start()
    wait_until(lambda: moving(path))
    os.kill(pid, number)
    failed = time.monotonic()
    wait_until(lambda: ended(path) or bool((commands(path)[:, 0] > failed).sum() >= 2 * MOVING))
    since = commands(path)
    since = since[since[:, 0] > failed]
    assert (np.abs(since[:, 1] - since[-1, 1]) > STEP / 2).sum() <= MOVING, since
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    playing.join(PATIENCE)
    assert len(said) == 1 and says in said[0]


def test_the_next_episode_waits_for_a_decision_of_the_last():
    """One connection and one state serve all episodes, so two decisions at a time would mix them."""
    together = threading.Barrier(2, timeout=0.5)
    alone: list[bool] = []

    class Slow(FunctionPolicy):
        def act(self, features, state, mode, generator):
            try:
                together.wait()
            except threading.BrokenBarrierError:
                alone.append(True)
            return SimpleNamespace(action=np.zeros((1, 2, 2), np.float32)), state

        def encode(self, obs):
            return {}

    decide = PolicyDecider(Slow(SimulatedRobot(options=OPTIONS).env_spec, leaning), None)
    query = SimpleNamespace(obs=SimpleNamespace(public=lambda: None), consumed=None, delay=1)
    deciding = [threading.Thread(target=decide, args=(query,)) for _ in range(2)]
    for one in deciding:
        one.start()
    for one in deciding:
        one.join(PATIENCE)
    assert alone == [True, True]
