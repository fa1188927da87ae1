"""The examples with a user's own environment, reward or policy keep the contract and do what their pages say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from docs.examples import ball_env, droid_layout, height_reward, record_dataset
from sims.mujoco.tasks.lift import LiftExpert
from tests.docs.conftest import ROOT
from tests.patience import PATIENCE
from vla_rl.contract.check import check_env
from vla_rl.experience.collect import collect_demonstrations
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.rewards.reward_model import Reward
from vla_rl.serving import openpi
from vla_rl.serving.observation import SingleObservation


def test_the_ball_keeps_the_contract():
    with closing(ball_env.make(3)) as env:
        assert len(check_env(env)) == 7


def test_its_expert_stops_at_the_mark_and_doing_nothing_does_not():
    with closing(ball_env.make(16)) as env:
        assert collect_demonstrations(env, ball_env.BallExpert().act, list(range(16))).count == 16
        env.reset(np.arange(16), np.arange(16))
        for _ in range(ball_env.LIMIT // 10):
            step = env.step(np.zeros((16, 10, 1)))
        assert step.done.all() and step.success.mean() < 0.3
        assert set(step.cause) <= {"success", "time_limit"}


@pytest.mark.full
def test_the_height_reward_pays_for_lifting_and_not_for_waiting():
    assert isinstance(height_reward.HeightReward(), Reward)
    earned = {}
    for name in ("lifting", "waiting"):
        with closing(height_reward.make(8)) as env:
            assert len(check_env(env)) == 7
            obs = env.reset(np.arange(8), np.arange(8))
            total = np.zeros(8)
            for _ in range(24):
                act = LiftExpert(horizon=1).act(obs) if name == "lifting" else np.zeros((8, 1, 4), np.float32)
                step = env.step(act)
                obs, total = step.obs, total + step.reward.sum(1)
            earned[name] = total
    assert earned["lifting"].min() > 1.0
    assert np.abs(earned["waiting"]).max() < 0.3


def test_the_droid_layout_sends_what_a_server_can_read():
    picture = np.zeros((8, 8, 3), np.uint8)
    obs = SingleObservation({"exterior": picture, "wrist": picture + 1}, np.arange(8, dtype=np.float32), "wipe")
    sent = openpi.unpack(openpi.pack(droid_layout.request(obs)))
    assert sent["observation/joint_position"].tolist() == list(range(7)) and sent["prompt"] == "wipe"
    assert sent["observation/gripper_position"].tolist() == [7] and sent["observation/wrist_image_left"].all()


def test_the_recorded_dataset_comes_back_as_it_was(tmp_path):
    done = subprocess.run(
        [sys.executable, "docs/examples/record_dataset.py", str(tmp_path / "data")],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    episodes = load_demonstrations(tmp_path / "data")
    mine = list(record_dataset.my_episodes(20))
    assert episodes.count == 20
    np.testing.assert_array_equal(episodes.action, np.concatenate([actions for _, _, actions, _ in mine]))
    texts = [episodes.tasks[task] for task in episodes.task[::30]]
    assert texts == [record_dataset.TASKS[task] for _, _, _, task in mine]


@pytest.mark.full
def test_the_example_s_config_trains_its_policy(tmp_path):
    """In a folder outside the repository, in one process."""
    for name in ("own_config.py", "noisy_policy.py"):
        shutil.copy(ROOT / "docs/examples" / name, tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    code = "import sys; from vla_rl.cli import main; [main(given.split()) for given in sys.argv[1:]]"
    commands = ["train own_config.py:point_mass --rl.loop.iterations 40", "eval runs/point_mass --episodes 64"]
    commands += ["inspect runs/point_mass/checkpoints/best"]
    command = [sys.executable, "-P", "-c", code, *commands]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/point_mass/summary.json").read_text())
    assert summary["rl"]["success"] > 0.9
    played = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    assert json.loads(played)["success"] > 0.9 and "noisy_policy:LinearGaussian" in done.stdout
