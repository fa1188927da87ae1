"""GRPO and WoVR's form of it in imagined rollouts: the groups of ``configs/imagine.py``, small."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.world_models.small_models import SMALL
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.check import random_actions
from vla_rl.experience.groups import GroupConfig
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imagine.calibrated_model import ImaginedEnvFactory
from vla_rl.recipes.improve import build, improve
from vla_rl.recipes.trainers import RLConfig, RunContext
from vla_rl.training.tracking import RunFolder
from world_models.config import ImaginationConfig, Limits, WorldModelConfig
from world_models.initial_states import InitialStatePool, InitialStates
from world_models.model import WorldModel

GROUPS = GroupConfig(groups=2, size=3, ahead=1, limit=8, num_envs=6)


def moments(model: WorldModel, count: int, chooser: np.random.Generator) -> InitialStates:
    pictures = chooser.integers(0, 256, (count, 1 + model.config.context_frames, *model.picture), np.uint8)
    state = chooser.uniform(model.spec.state.low, model.spec.state.high, (count, model.spec.state.shape[0]))
    tasks = chooser.integers(0, len(model.spec.tasks), count)
    return InitialStates(pictures, state.astype(np.float32), tasks, np.zeros(count, np.int64))


@pytest.fixture(scope="module")
def env_factory() -> ImaginedEnvFactory:
    return imagined_lift()


def imagined_lift() -> ImaginedEnvFactory:
    """Imagined rollouts by random weights, half of whose calls succeed and a quarter of which are uncertain."""
    env, chooser = make("lift", num_envs=1), np.random.default_rng(0)
    torch.manual_seed(0)
    model = WorldModel(env.spec, WorldModelConfig(backbone=SMALL))
    env.close()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    initial_states = InitialStatePool(moments(model, 20, chooser), moments(model, 20, chooser))
    config = ImaginationConfig(horizon=10, batch_size=6, success_threshold=2.0, failure_threshold=2.0, resamples=0)
    imagined = ImaginedEnvFactory(model, initial_states, Limits((np.inf,)), config).make_training(30)
    imagined.reset(np.arange(30), np.arange(30))
    imagined.step(random_actions(imagined, 5, chooser))
    usual, limit = np.median(imagined.outcome[:, 0]), np.quantile(imagined.uncertainty, 0.75)
    return ImaginedEnvFactory(
        model, initial_states, Limits((float(limit),)), replace(config, success_threshold=float(usual))
    )


def small(name: str) -> RLConfig:
    """The method of a config with a few short groups."""
    method: RLConfig = load_config(f"configs/imagine.py:{name}").rl
    return replace(method, experience=GROUPS, loop=replace(method.loop, iterations=2, validate_every=1))


def test_a_groups_members_begin_alike_and_truncated_ones_stay(policy, env_factory):
    setup = build(small("lift_grpo"), RunContext(env_factory, deepcopy(policy), 1, OneProcess()))
    truncated = 0
    for _ in range(4):
        rollout = setup.source.next()
        assert rollout.valid.any(-1)[0].all() and (rollout.terminated | rollout.truncated).sum(0).tolist() == [1] * 6
        state, features = (rollout.features[name][0].unflatten(0, (2, 3)) for name in ("state", "image_features"))
        assert torch.equal(state, state[:, :1].expand_as(state)) and not torch.equal(state[0], state[1])
        torch.testing.assert_close(features, features[:, :1].expand_as(features), rtol=0, atol=1e-6)
        truncated += len(rollout.final_index)
        found = setup.learner.update(rollout)
        assert found["rollout/truncated"] == len(rollout.final_index) / 6
        assert not torch.equal(rollout.sample[0, 0], rollout.sample[0, 1])  # and differ by what the policy does
        assert 0 < rollout.info["rollout/truncations"] < rollout.info["rollout/episodes"]
    assert truncated > 0
    setup.env.close()


@pytest.mark.parametrize("name", ["lift_wovr", pytest.param("lift_grpo", marks=pytest.mark.full)])
def test_the_recipe_learns_in_imagined_rollouts(policy, env_factory, tmp_path, name):
    folder, context = RunFolder(tmp_path / "run", {}), RunContext(env_factory, deepcopy(policy), 1, OneProcess())
    improve(small(name), context, EvaluationConfig(validation=4, test=4, ablation=4, num_envs=4), folder)
    lines = folder.metrics("rl")
    assert len(lines) == 3 and lines[-1]["env/steps_total"] > 0
    assert all(
        0 <= line["rollout/truncated"] <= 1 and line["rollout/truncations"] <= line["rollout/episodes"]
        for line in lines[1:]
    )
    assert any(line["rollout/decisions"] > 0 and line["policy/grad_norm"] > 0 for line in lines[1:])
