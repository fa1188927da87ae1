"""A vision-language model pays: from its folder to a judge, and from the judge to PPO, real or imagined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.commands import save_untrained
from tests.recipes.imagine.test_general import short
from tests.recipes.imagine.test_grpo import imagined_lift
from tests.recipes.test_rewarded import PPO
from tests.rewards.test_judge import PROMPT, llava
from vla_rl.cli import main
from vla_rl.contract.batch import OneProcess
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.policies.flow import FlowSampler, FlowSde, LastStep
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary
from vla_rl.recipes.building import build
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig, EnvFactory
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.improve import improve
from vla_rl.recipes.trainers import LearnedReward, RunContext
from vla_rl.rewards.env import RewardWeights
from vla_rl.rewards.judge import VLMJudge
from vla_rl.rewards.reward_model import load_reward
from vla_rl.training.tracking import RunFolder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """What ``rewards.py:judge`` leaves, by a small untrained model that never calls anything done."""
    folder = tmp_path_factory.mktemp("judge")
    model = llava(folder / "model")
    given = ["--judge.vlm.model", str(model), "--judge.prompt", PROMPT, "--judge.threshold", "0.999"]
    main(["train", "configs/rewards.py:judge", *given, "--test", "2", "--num-envs", "2", "--out", str(folder / "run")])
    return folder / "run"


def test_a_judge_is_made_from_a_models_folder_and_asked_about_test_scenes(run):
    judge = load_reward(run / "checkpoints/judge")
    assert isinstance(judge, VLMJudge) and judge.config.prompt == PROMPT and judge.config.threshold == 0.999
    frames = json.loads((run / "summary.json").read_text())["test"]["frames"]
    assert frames["precision"]["of"] == 0 and frames["recall"]["value"] == 0 and frames["of"] > 2 * 2 * 20


def place_policy() -> TinyVLA:
    spec = EnvConfig("place").spec()
    config = TinyConfig(width=32, blocks=1, sampler=FlowSampler(FlowSde(0.5), LastStep(), 4))
    torch.manual_seed(0)
    return TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine.from_bounds(spec.state), config)


@pytest.mark.parametrize("kind", ["simulator", "imagined rollout"])
def test_ppo_is_paid_by_it_and_validated_by_the_environments_own_success(kind, run, tmp_path):
    real = kind == "simulator"
    env: EnvFactory = EnvConfig("place", options={"deadline": 10}) if real else imagined_lift()
    policy = place_policy() if real else TinyVLA.from_pretrained(save_untrained(tmp_path / "policy"))
    reward = LearnedReward(str(run / "checkpoints/judge"), RewardWeights(progress=3.0))
    context = RunContext(env, policy, 1, OneProcess(), reward=reward)
    setup = build(PPO, context)
    paid = setup.source.next().reward.numpy()
    setup.env.close()
    assert (paid != 0).any() and (np.abs(paid) <= 3).all(), "differences of the model's answers"
    folder = RunFolder(tmp_path / "run", {})
    improve(PPO, context, EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4), folder)
    lines = folder.metrics("rl")
    assert len(lines) == 3 and max(line.get("policy/grad_norm", 0.0) for line in lines) > 0
    assert lines[0]["eval/score"] in (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.full
def test_place_is_imagined_and_paid_by_it_through_the_whole_recipe(run, tmp_path):
    recipe = load_config("rewards.py:place_imagined")
    small = short(recipe)
    place_policy().save_pretrained(tmp_path / "start")
    shown = tmp_path / "shown"  # a world model needs successes
    save_demonstrations(collect(EnvConfig("place"), 2, seed=1), shown, video="never")
    paid = replace(recipe.reward, folder=str(run / "checkpoints/judge"))
    plan = replace(small.plan, demonstrations=str(shown))
    recipe = replace(small, reward=paid, plan=plan, policy=str(tmp_path / "start"))
    found = recipe.run(RunFolder(tmp_path / "run", recipe))
    assert found["imagined_rl"]["episodes"] == 4
