"""A policy of joint positions: what it has seen, not the joints' bounds, is its scale; a checkpoint keeps it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from configs import so101
from sims.catalog import spec_of
from vla_rl.contract.env import Observation
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.normalization import Affine
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.imitate import NewTinyOfJoints

SPEC = spec_of("so101", image_size=16)


@pytest.fixture
def policy():
    """Of two steps in which the first joint moved by 0.4 rad and the others hardly."""
    action = np.zeros((2, 6), np.float32)
    action[1, 0] = 0.4
    zeros = np.zeros(2, np.int64)
    images = {"front": np.zeros((2, 16, 16, 3), np.uint8)}
    episodes = Demonstrations(images, action + 1e-4, zeros, np.arange(2), action, zeros, zeros, SPEC.tasks, 25.0)
    return NewTinyOfJoints(horizon=3, width=16, blocks=1).build(SPEC, episodes, seed=1).eval()


def acted(policy):
    obs = Observation(
        {"front": np.zeros((1, 16, 16, 3), np.uint8)}, np.zeros((1, 6), np.float32), np.zeros(1, int), np.zeros(1, int)
    )
    return policy.act(policy.encode(obs), {}, "eval", torch.Generator().manual_seed(0))[0].action


def test_actions_and_states_are_in_units_of_what_was_demonstrated(policy):
    assert policy.action_scale.scale == pytest.approx((np.sqrt(0.08), *(0.05,) * 5))
    assert policy.action_scale.offset[0] == pytest.approx(0.2)
    assert policy.proprioception.scale[1] == 0.05


def test_a_checkpoint_keeps_the_scale_and_an_older_one_has_that_of_the_bounds(policy, tmp_path):
    policy.save_pretrained(tmp_path)
    assert torch.equal(acted(load_policy(tmp_path)), acted(policy))
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["action_scale"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert load_policy(tmp_path).action_scale == Affine.from_bounds(SPEC.action)


def test_the_config_imitates_fifty_episodes_in_chunks_for_real_time():
    recipe = so101.imitate()
    assert isinstance(recipe.new, NewTinyOfJoints) and recipe.new.horizon * SPEC.control_dt == pytest.approx(0.64)
    assert recipe.imitation.demonstrations == 50 and recipe.env.spec().action == SPEC.action
