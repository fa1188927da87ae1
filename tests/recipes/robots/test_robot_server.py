"""A policy server in place of a local policy: the same control steps, and an arm that holds when the server fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from robot_drivers.simulated import SimulatedRobot
from tests.patience import PATIENCE, wait_until
from tests.recipes.robots.arms import HORIZON, OPTIONS, file_arm, simulated
from tests.robot_drivers.arms import DT, SPEED
from tests.robot_drivers.test_control import STEP, WATCHDOG, commands, ended, moving
from tests.serving.served import serving_openpi
from vla_rl.cli import main
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes.robots import drive
from vla_rl.recipes.robots.drive import PolicyDecider
from vla_rl.recipes.robots.session import LockstepSession, open_session
from vla_rl.serving import openpi

LAYOUT = f"?layout={__name__}:joints"
ACTIONS = 16  # of a chunk
MOVING = 2 * ACTIONS + WATCHDOG  # commands at most: of a chunk that is executed and one that is on its way


def leaning(obs: Observation) -> np.ndarray:
    """[E,6,D]: every joint a little on, the more the brighter the picture."""
    on = 0.01 * obs.images["front"].mean() / 255
    return obs.state[:, None] + on * np.arange(1, 7, dtype=np.float32)[:, None]


def executed(policy: str) -> np.ndarray:
    """[T,D], what the simulated arm was sent in one episode."""
    config, settings = simulated(0.6), drive.EpisodesConfig(policy, 1, 1, HORIZON)
    with closing(LockstepSession(config, HORIZON)) as session, drive._deciding(session, config, settings) as decide:
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


def joints(request: Any) -> dict[str, Any]:
    """The layout that the client is given for somebody else's server."""
    return {"joint_position": request.state[:1], "gripper_position": request.state[1:], "prompt": request.instruction}


def answer(connection: Any, nonsense: Sequence[int]) -> None:
    """Chunks that move a toy arm up from where it is; once there is ``nonsense`` they are no numbers."""
    with suppress(ConnectionClosed):
        connection.send(openpi.pack({"robot": "toy"}))
        for data in connection:
            request = openpi.unpack(data)
            assert request["prompt"] == "lift" and set(request) == {"joint_position", "gripper_position", "prompt"}
            here = np.concatenate([request["joint_position"], request["gripper_position"]])
            up = here + np.arange(1, ACTIONS + 1)[:, None] * [SPEED * DT, 0.0]
            connection.send(openpi.pack({"actions": np.full_like(up, np.nan) if nonsense else up}))


SERVER = f"""
import signal
from functools import partial
from websockets.sync.server import serve
from {__name__} import answer
nonsense = []
signal.signal(signal.SIGUSR1, lambda number, frame: nonsense.append(number))
with serve(partial(answer, nonsense=nonsense), "127.0.0.1", 0, compression=None) as server:
    print(f"ws://127.0.0.1:{{server.socket.getsockname()[1]}}", flush=True)
    server.serve_forever()
"""


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """Address and process of somebody else's policy server."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        process.kill()


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, "so nothing more is exchanged with it"),
        pytest.param(signal.SIGSTOP, "so nothing more is exchanged with it", marks=pytest.mark.full),  # killed later
        pytest.param(signal.SIGUSR1, "an action that is not finite", marks=pytest.mark.full),
    ],
)
def test_when_the_server_fails_in_mid_episode_the_arm_holds(server, number, says, tmp_path: Path):
    path, (address, pid) = tmp_path / "commands", server
    config = file_arm(path, tasks=("lift",), seconds=PATIENCE)
    settings = drive.EpisodesConfig(address + LAYOUT, 1, 1, HORIZON)
    said: list[str] = []

    def play() -> None:
        with (
            closing(open_session(config, HORIZON, lambda sentence: "")) as session,
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
