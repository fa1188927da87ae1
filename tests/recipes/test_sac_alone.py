"""SAC for a task with continuous actions: no policy and no demonstrations."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vla_rl.cli import main
from vla_rl.contract.errors import UserError
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.recipe import run

SHORT = ["--rl.loop.iterations", "2", "--rl.algorithm.learning-starts", "64", "--evaluation.validation", "2"]


@pytest.mark.full
def test_it_reaches_the_optimum_of_the_point_mass(tmp_path):
    """In 2,048 control steps; the policy is then evaluated as any other."""
    main(["train", "gym.py:sac", "--env", "point_mass", "--rl.loop.env-steps", "2048", "--out", str(tmp_path / "run")])
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["rl"]["success"] > 0.9 and not (tmp_path / "run/checkpoints/start").exists()
    main(["eval", str(tmp_path / "run"), "--episodes", "8", "--num-envs", "8"])


def test_it_is_built_without_a_policy_and_refuses_discrete_actions(tmp_path):
    main(["train", "gym.py:sac", *SHORT, "--evaluation.test", "2", "--out", str(tmp_path / "run")])
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["env_steps"] == 128 and summary["return"]["episodes"] == 2 and "rl" not in summary
    discrete = replace(load_config("gym.py:sac"), env=EnvConfig("gym", {"id": "CartPole-v1"}))
    with pytest.raises(UserError, match=r"those of 'CartPole-v1' are discrete.*choose PPO"):
        run(discrete, str(tmp_path / "discrete"))
