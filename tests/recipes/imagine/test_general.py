"""The same recipe on what people bring: cameras of several sizes, a Gymnasium task that is only seen, no camera."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.commands import save_untrained
from tests.world_models.pushing import played
from tests.world_models.small_models import SMALL
from vla_rl.cli import main
from vla_rl.contract.batch import OneProcess
from vla_rl.evaluation.agreement import TrustConfig
from vla_rl.experience.datasets import save_demonstrations
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.experience.rollout import WindowConfig
from vla_rl.policies.feed_forward import CategoricalConfig, CategoricalPolicy
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imagine.agreement import measure_prediction_quality
from vla_rl.recipes.imagine.calibrated_model import call_ends
from vla_rl.recipes.imagine.plan import CollectConfig, Plan
from vla_rl.recipes.imagine.recipe import Imagine, SavedRun
from vla_rl.recipes.imitate import collect
from vla_rl.recipes.trainers import RunContext
from vla_rl.training.fit import FitConfig
from vla_rl.training.loop import LoopConfig
from vla_rl.training.tracking import RunFolder
from vla_rl.training.world_model import WorldModelFit
from world_models.config import ImaginationConfig, PredictedReward, WorldModelConfig
from world_models.initial_states import KeyframeConfig
from world_models.model import WorldModel

COLLECT = CollectConfig(4, 2, 2, calibration=2, held_out=2, num_envs=4)
EVALUATION = EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4)
SIZES = {"cameras": ["front", "side"], "image_size": {"front": 32, "side": 24}}


def short(recipe: Imagine, frames: int = 5, **model: object) -> Imagine:
    """``recipe`` with the smallest of everything, trusting whatever comes out."""
    plan = Plan(
        WorldModelConfig(frames, backbone=SMALL, reward=recipe.plan.model.reward, **model),
        ImaginationConfig(horizon=10, deadline=10, batch_size=4, reward=recipe.plan.imagination.reward),
        KeyframeConfig(),
        COLLECT,
        fit=WorldModelFit(*[FitConfig(steps=2, batch=4)] * 4),
        trust=TrustConfig(max_hallucinated=1.0, max_missed=1.0),
    )
    rl = replace(recipe.rl, experience=WindowConfig(4, 2), loop=LoopConfig(1, validate_every=1))
    return replace(recipe, plan=plan, rl=rl, evaluation=EVALUATION)


@pytest.mark.full
def test_cameras_of_two_sizes_go_through_recipe_and_commands(tmp_path, capsys):
    env = EnvConfig("lift", options=SIZES, training_options={"deadline": 7})
    demonstrations = tmp_path / "demonstrations"
    save_demonstrations(collect(env, 2, seed=1), demonstrations, video="never")
    start = save_untrained(tmp_path / "start", **SIZES)
    recipe = short(load_config("imagine.py:lift"), robot_crop=0, resolution=(24, 32), uncertainty="pictures")
    recipe = replace(recipe, env=env, policy=str(start), plan=replace(recipe.plan, demonstrations=str(demonstrations)))
    folder = RunFolder(tmp_path / "run", recipe)
    found = recipe.run(folder)
    assert found["imagined_rl"]["episodes"] == 4
    saved = json.loads((folder.checkpoint("world") / "config.json").read_text())
    assert saved["config"]["resolution"] == [24, 32]
    main(["imagine", "rollout", str(folder.path), "--episodes", "2"])
    policies = [str(folder.checkpoint(name)) for name in ("start", "best")]
    main(["imagine", "rank", str(folder.path), *policies])
    assert "Which policy is best" in (folder.path / "rank.html").read_text()


@pytest.mark.full
def test_a_gymnasium_task_that_is_only_seen_is_imagined(tmp_path):
    """Paid what the world model says of the task's own reward, whose agreement is among the numbers."""
    short_run = ["--rl.loop.iterations", "1", "--evaluation.test", "4", "--evaluation.validation", "2"]
    main(["train", "gym.py:pixels", *short_run, "--out", str(tmp_path / "pixels")])
    recipe = short(load_config("imagine.py:catch_rewards"), frames=3, robot_crop=0, uncertainty="pictures")
    many = CollectConfig(40, 0, 40, calibration=10, held_out=10, num_envs=16)  # a random paddle catches one in nine
    plan = replace(recipe.plan, collect=many)
    recipe = replace(recipe, policy=str(tmp_path / "pixels" / "checkpoints" / "best"), plan=plan)
    found = recipe.run(RunFolder(tmp_path / "run", recipe))
    assert found["imagined_rl"]["episodes"] == 4 and found["simulator_episodes"] == 80 and found["horizon"] <= 9
    saved = SavedRun.load(tmp_path / "run")
    assert saved.calibrated.imagination.reward == PredictedReward() and saved.calibrated.model.reward is not None
    assert set(saved.held_out.recorded_rewards().tolist()) == {-1.0, 0.0, 1.0}
    rows = measure_prediction_quality(saved.calibrated, recipe.env, saved.held_out, saved.held_out, 1)
    assert [row["horizon"] for row in rows] == [3, 6, 9] and rows[0]["reward"]["spread"] == 0.0
    assert rows[0]["reward"]["replays"] == saved.held_out.count and rows[2]["reward"]["spread"] > 0.5


def test_the_critic_of_a_policy_of_pixels_reads_pixels():
    """Catch has no proprioception: without them every state but its time would be the same."""
    env_config = load_config("imagine.py:catch").env
    env = env_config.make(4)
    policy = CategoricalPolicy(env.spec, config=CategoricalConfig(cameras=("image",)))
    context = RunContext(env_config, policy, 1, OneProcess())
    critic = load_config("imagine.py:catch").rl.build_learner(context, env, policy).critic
    torch.nn.init.normal_(critic.head.weight)
    value = critic(policy.encode(env.reset(np.arange(4), np.arange(4))))
    env.close()
    assert len(set(value.tolist())) > 1


@pytest.mark.parametrize(
    "name", ["lift", "lift_to_rank", "place", "place_to_rank", "push", "lift_dit", "lift_grpo", "lift_wovr"]
)
def test_every_recipe_is_ready_for_what_its_task_gives(name):
    """Model, window and deadlines fit the environment that the recipe is for."""

    recipe = load_config(f"imagine.py:{name}")
    spec = recipe.env.spec()
    model = WorldModel(spec, replace(recipe.plan.model, precision="float32"), 0.0, 1.0)
    assert model.picture == (3, 64, 64)
    assert recipe.plan.imagination.deadline == recipe.env.training_options.get("deadline")
    assert recipe.plan.imagination.horizon <= spec.time_limit


CATCH = ("--env.name", "gym", "--env.options", '{"id": "sims.catch:vla_rl/Catch-v0"}', "--env.training-options", "{}")


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("--env.options", '{"render": false}'), "'lift' has no camera, so there is nothing to imagine"),
        (("--plan.model.resolution", "60", "30"), "pictures of 60 x 30 pixels do not divide into the model's cells"),
        (CATCH, "has no notion of success, which imagined rollouts are rewarded with"),
    ],
)
def test_what_cannot_be_imagined_is_refused_before_it_is_played(arguments, what, complaint, tmp_path):
    out = tmp_path / "run"
    assert what in complaint("train", "imagine.py:lift", *arguments, "--policy", "nowhere", "--out", out)
    assert not (out / "episodes").exists()


def test_the_last_horizon_may_end_in_the_middle_of_a_call():
    """Catch is decided with the ninth action, and calls end after the fifth and the tenth."""
    index, one = np.zeros(10, int), played(1, seed=0)
    names = ("state", "action", "task", "success", "failed", "seed", "reward")
    images = {name: item[index] for name, item in one.images.items()}
    taken = {name: getattr(one, name)[index] for name in names}
    nine = Trajectories(images, episode=index.astype(np.int64), **taken)
    calls = SimpleNamespace(config=WorldModelConfig(frames=5))
    expected = {3: [3], 5: [5], 7: [5, 7], 9: [5, 9], 25: [5, 9]}
    assert {h: call_ends(calls, nine, ImaginationConfig(horizon=h)) for h in expected} == expected
