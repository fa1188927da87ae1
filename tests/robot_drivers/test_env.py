"""A robot as an environment: chunks in real time, with what was really executed, and no reset by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_drivers.env import RobotEnv, robot_env_spec
from robot_drivers.runtime import ControlProcess
from tests.robot_drivers.file_arm import config
from tests.robot_drivers.toy_arm import ARM, observation
from vla_rl.contract.env import VecEnv
from vla_rl.contract.errors import ContractError, NonFiniteError

LIMIT = 7
SPEC = robot_env_spec(ARM, {}, ("lift",), LIMIT, 4)
ONE, NOBODY = np.arange(1), np.zeros(0, int)


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RobotEnv, list[str]]]:
    asked: list[str] = []

    def ask(sentence: str) -> str:
        asked.append(sentence)
        return ""

    path: Path = tmp_path_factory.mktemp("robot") / "commands"
    whole = replace(config(str(path)), chunks="robot_drivers.executor:OpenLoop", chunks_options={})
    env = RobotEnv(ControlProcess(whole), SPEC, observation, ask)
    yield env, asked
    env.close()


def upwards(env: RobotEnv, length: int) -> np.ndarray:
    """A slow chunk [1,H,2] from where the arm is."""
    here = env.reset(NOBODY, NOBODY).state[0]
    return (here + np.arange(1, length + 1)[:, None] * [0.002, 0.0])[None].astype(np.float32)


def test_a_person_prepares_every_episode(robot: tuple[RobotEnv, list[str]]) -> None:
    env, asked = robot
    before = len(asked)
    obs = env.reset(ONE, ONE)
    assert isinstance(env, VecEnv) and len(asked) == before + 1 and "Prepare the scene" in asked[-1]
    assert obs.time.tolist() == [0] and env.spec.profile == "hardware"
    env.reset(NOBODY, NOBODY)
    assert len(asked) == before + 1


def test_a_chunk_is_executed_and_every_action_has_its_frame(robot: tuple[RobotEnv, list[str]]) -> None:
    env, _ = robot
    env.reset(ONE, ONE)
    chunk = upwards(env, 4)
    step = env.step(chunk, "all")
    assert step.valid.all() and step.executed.shape == (1, 4, 2) and not step.done[0] and not step.intervened.any()
    assert [frame.time.tolist() for frame in step.frames] == [[1], [2], [3], [4]] and step.obs is step.frames[-1]
    for executed, frame in zip(step.executed[0], step.frames, strict=True):
        assert frame.state[0] == pytest.approx(executed, abs=1e-6), "the toy arm is where it was sent"
    assert np.abs(step.executed - chunk).max() < 0.02


def test_an_episode_ends_at_its_time_limit_and_then_idles(robot: tuple[RobotEnv, list[str]]) -> None:
    env, _ = robot
    env.reset(ONE, ONE)
    env.step(upwards(env, 4))
    last = env.step(upwards(env, 4))
    assert last.valid.tolist() == [[True, True, True, False]] and last.truncated[0] and last.cause == ("time_limit",)
    assert len(last.frames) == 4 and last.frames[2] is last.frames[3] and not last.success[0]
    idle = env.step(np.full((1, 2, 2), np.nan))
    assert not idle.valid.any() and idle.truncated[0] and idle.obs is last.obs


def test_what_is_no_chunk_of_this_robot_moves_nothing(robot: tuple[RobotEnv, list[str]]) -> None:
    env, _ = robot
    env.reset(ONE, ONE)
    for shape in ((1, 2, 3), (2, 2, 2), (1, 0, 2), (1, 5, 2), (2, 2)):
        with pytest.raises(ContractError, match="not \\[1,H,2\\] with H up to 4"):
            env.step(np.zeros(shape))
    with pytest.raises(NonFiniteError, match="NaN"):
        env.step(np.full((1, 2, 2), np.nan))
