"""The examples that bring something of one's own: they keep the contract, and do what their pages say."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import numpy as np

from docs.examples import ball_env, height_reward, record_dataset
from sims.mujoco.tasks.lift_expert import LiftExpert
from tests.docs.conftest import ROOT
from tests.patience import PATIENCE
from vla_rl.contract.check import check_env
from vla_rl.experience.collect import collect_demonstrations
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.rewards.reward import Reward


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


def test_the_ball_s_picture_shows_ball_and_mark():
    with closing(ball_env.make(2)) as env:
        obs = env.reset(np.arange(2), np.array([3, 4]))
    blue = (obs.images["side"] == (40, 40, 200)).all(-1)
    red = (obs.images["side"] == (200, 40, 40)).all(-1)
    for place, shown in ((obs.state[:, 0], blue), (obs.extras["privileged/mark"][:, 0], red)):
        columns = np.array([np.flatnonzero(one.any(0)).mean() for one in shown])
        np.testing.assert_allclose((place + 1) / 2 * 29 + 1, columns, atol=0.51)


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


def test_the_recorded_dataset_can_be_imitated(tmp_path):
    record_dataset.main(tmp_path / "data", 2)
    assert ImitateDataset(dataset=str(tmp_path / "data"))._read().count == 2
