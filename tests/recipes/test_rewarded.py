"""Any method in a simulator or in imagination, paid by a reward model from a folder."""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.recipes.imagine.test_grpo import GROUPS, imagined_lift
from vla_rl.algorithms.group_relative import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.config import from_json, to_json
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.improve import build, improve
from vla_rl.recipes.trainers import LearnedReward, RLConfig, RunContext
from vla_rl.rewards.env import RewardedEnv, RewardWeights
from vla_rl.rewards.progress import ProgressConfig, ProgressCritic
from vla_rl.rewards.reward_model import words_of
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import RunFolder

SDE = FlowSampler(FlowSde(0.5), LastStep(), 4)
LOOP = LoopConfig(2, validate_every=1)
PPO = RLConfig(SDE, WindowConfig(4, 2), loop=LOOP, algorithm=PPOConfig(critic_warmup=0))
GRPO = RLConfig(SDE, replace(GROUPS, groups=1, ahead=0, num_envs=3), loop=LOOP, algorithm=GRPOConfig())
EVALUATION = EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4)


@pytest.fixture(scope="module")
def critic(tmp_path_factory) -> str:
    """An untrained progress critic for lift, which takes nothing for done."""
    spec = EnvConfig("lift").spec()
    torch.manual_seed(0)
    cameras = {name: item.shape for name, item in spec.images.items()}
    model = ProgressCritic(cameras, words_of(spec.tasks), ProgressConfig(width=8, stem=4, keypoints=2))
    model.threshold = 1e9
    folder = tmp_path_factory.mktemp("reward") / "progress"
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["simulator", "imagined rollout"])
def env_factory(request) -> EnvFactory:
    return EnvConfig("lift", options={"deadline": 5}) if request.param == "simulator" else imagined_lift()


def learnt(method, context: RunContext, path: Path) -> list[dict[str, float]]:
    """The metrics of a short run: it has learnt, and is evaluated by the environment's own success."""
    folder = RunFolder(path, {})
    improve(method, context, EVALUATION, folder)
    lines = folder.metrics("rl")
    assert len(lines) == 3 and max(line.get("policy/grad_norm", 0.0) for line in lines) > 0
    assert lines[0]["eval/score"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    return lines


@pytest.mark.full
@pytest.mark.parametrize("method", [PPO, GRPO], ids=["ppo", "grpo"])
def test_every_method_learns_from_it(env_factory, policy, critic, tmp_path, method):
    reward = LearnedReward(critic, RewardWeights(progress=3.0))
    context = RunContext(env_factory, deepcopy(policy), 1, OneProcess(), reward=reward)
    with closing(build(method, context)) as setup:
        assert isinstance(setup.env, RewardedEnv) and not isinstance(context.env.make(2), RewardedEnv)
        paid = setup.source.next().reward
    assert (paid < 0).any() and (paid > 0).any()  # forwards and back, which neither environment pays itself
    learnt(method, context, tmp_path / "run")


def test_only_the_environment_for_learning_is_rewarded(critic):
    env, reward = EnvConfig("lift", training_options={"deadline": 3}), LearnedReward(critic)
    context = RunContext(env, None, 1, OneProcess(), reward=reward)
    with closing(context.env.make(1)) as plain, closing(PPO.build_env(context)) as rewarded:
        assert plain.spec.name == "lift" and rewarded.spec.name == "rewarded lift"
        env_ids = np.arange(rewarded.num_envs)
        rewarded.reset(env_ids, env_ids)
        chunk = np.zeros((len(env_ids), 4, rewarded.spec.action_dim))
        assert (rewarded.step(chunk).valid.sum(1) == 3).all()  # the training options hold


LIKE = {"lift": "demo.py:last_step", "place": "tabletop.py:place"}
LIKE |= {"imagined": "imagine.py:lift", "place_imagined": "imagine.py:place"}


@pytest.mark.parametrize("name", LIKE)
def test_its_configs_survive_json_and_can_be_overridden(name):
    recipe = load_config(f"rewards.py:{name}")
    assert from_json(to_json(recipe)) == recipe and recipe.reward.folder
    assert replace(recipe, reward=LearnedReward()) == load_config(LIKE[name])
