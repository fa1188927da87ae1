"""A downloaded OpenVLA is trained by the recipe that trains every policy, from its folder to its best checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.policies.openvla.test_public import published
from vla_rl.algorithms.group_relative import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.openvla.decoding import Autoregressive, OpenVLAOptions, Parallel
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.vla.options import TrainLoRA
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import Improve
from vla_rl.recipes.policies import StartFrom
from vla_rl.recipes.trainers import OnPolicyRL
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import RunFolder

LIFT = EnvConfig("lift", options={"deadline": 5})
OPTIONS = OpenVLAOptions(temperature=1.6, logprob_per="token", trains=TrainLoRA(rank=2))
ONCE = LoopConfig(iterations=1, validate_every=1)
PPO = OnPolicyRL(StartFrom(), WindowConfig(2, 2), ONCE, PPOConfig(epochs=1, minibatch=4, critic_warmup=0))
GROUPS = GroupConfig(groups=1, size=2, ahead=0, limit=2, num_envs=2)
GRPO = OnPolicyRL(StartFrom(), GROUPS, ONCE, GRPOConfig(epochs=1, minibatch=4))


@pytest.mark.parametrize(
    ("rl", "decoding"),
    [(PPO, Autoregressive()), pytest.param(GRPO, Parallel(8), marks=pytest.mark.full)],
    ids=["PPO of OpenVLA", "GRPO of OpenVLA-OFT"],
)
def test_a_downloaded_openvla_is_trained(tmp_path, rl, decoding):
    numbers = {"q01": [-1.0] * 4, "q99": [1.0] * 4, "mask": [True] * 3 + [False]}
    base = published(tmp_path / "base", norm_stats={"libero": {"action": numbers}})
    options = replace(OPTIONS, decoding=decoding, horizon=min(5, decoding.actions))
    evaluation = EvaluationConfig(validation=2, test=2)
    recipe = Improve(rl, policy=str(base), env=LIFT, evaluation=evaluation, vla=options)
    summary = recipe.run(RunFolder(tmp_path / "run", recipe))
    assert summary["env_steps"] > 0
    best = load_policy(tmp_path / "run" / "checkpoints" / "best", LIFT.spec())
    assert best.config == options and best.base.folder == str(base.resolve())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["policy/logprob_gap"] for row in rows if "policy/logprob_gap" in row]
    assert all(gap <= 1e-5 * np.sqrt(4 * best.horizon) for gap in gaps)
    assert gaps or rl is GRPO, "two members that both fail teach nothing"
