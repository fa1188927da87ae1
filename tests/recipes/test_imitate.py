"""Imitation of an environment's expert by new policies: from pixels alone, of joints, and a small SmolVLA grounded."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.catalog import spec_of
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.evaluation import seed_ranges
from vla_rl.experience.datasets import load_demonstrations
from vla_rl.experience.demonstrations import Demonstrations
from vla_rl.policies.normalization import ORIGIN, Affine, made_absolute
from vla_rl.policies.openvla.decoding import OpenVLAOptions, Parallel
from vla_rl.policies.openvla.heads import Regression
from vla_rl.policies.openvla.network import OpenVLAShape
from vla_rl.policies.openvla.policy import PointingOpenVLA
from vla_rl.policies.pi0.network import Gemma, Siglip
from vla_rl.policies.pi05.network import Pi05Shape
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape, TextShape, VisionShape
from vla_rl.policies.tiny import TinyVLA
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.policies.vla.pointing import PointingVLM
from vla_rl.recipes import imitate, imitate_dataset
from vla_rl.recipes.config_files import load_config
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import (
    NewOpenVLA,
    NewPi05,
    NewSmolVLA,
    NewTiny,
    NewTinyOfJoints,
    displaced,
    grounded_policy,
)
from vla_rl.recipes.imitate_dataset import ImitateExpert
from vla_rl.recipes.recipe import run
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig, RelativeImitationConfig


def recipe(count: int = 2, **options: int) -> ImitateExpert:
    return ImitateExpert(
        seed=3,
        env=EnvConfig("lift", options),
        new=NewTiny(width=32, blocks=1),
        imitation=ImitationConfig(count, stride=1, draws=1, fit=FitConfig(steps=3, batch=8)),
        evaluation=EvaluationConfig(validation=4, num_envs=2),
    )


def test_the_expert_is_recorded_imitated_and_the_policy_validated(tmp_path, monkeypatch):
    played, play = [], imitate.play
    monkeypatch.setattr(imitate, "play", lambda *given: played.extend(given[2]) or play(*given))
    run(recipe(), str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes"] == 2 and summary["validation"]["episodes"] == 4
    assert played == list(seed_ranges.VALIDATION[:4])
    assert {"collect", "imitation", "evaluation"} <= summary["seconds"].keys()
    episodes = load_demonstrations(tmp_path / "run" / "demonstrations")
    assert set(episodes.seed) == set(seed_ranges.training_seeds(3, "demonstrations")[:2])
    policy = TinyVLA.from_pretrained(tmp_path / "run" / "checkpoints" / "imitation")
    assert policy.spec == EnvConfig("lift").spec()
    torch.manual_seed(3)  # as the run began
    initial = TinyVLA(policy.spec, policy.vocabulary, policy.proprioception, policy.config)
    after = policy.state_dict()
    change = {name: float((after[name] - item).abs().max()) for name, item in initial.state_dict().items()}
    assert change["backbone.conv.0.weight"] > 0, "perception did not learn"
    assert max(change.values()) < 0.01, "three small steps led far away"


def test_demonstrations_of_an_expert_that_fails_are_left_out(tmp_path):
    run(recipe(4, deadline=14), str(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 1 <= summary["episodes"] < 4


def test_what_improves_metaworlds_policy_starts_where_imitation_ends():
    imitation, improved = (load_config(f"metaworld.py:{function}") for function in ("imitate", "residual_td3"))
    assert imitation.env == improved.env and improved.env.spec().families == ("drawer-open",)
    assert not improved.env.options["shaped"], "success is worth 1, as the critics' bounds say"
    assert Path(improved.policy).parts[:2] == ("runs", "imitate")


def test_a_joint_at_rest_in_the_demonstrations_is_not_blown_up():
    """so101's wrist does not roll in them: one that rolls by a tenth of a radian later is no huge input."""
    env = EnvConfig("so101")
    episodes = imitate_dataset.collect(env, 2, seed=1)
    roll = env.spec().state.names.index("wrist_roll.pos")
    assert episodes.state[:, roll].std() < 1e-2
    state = torch.as_tensor(episodes.state[:1])
    turned = state.clone()
    turned[0, roll] += 0.1
    for smallest, bounds in ((0.1, (0.9, 1.1)), (1e-3, (10.0, 200.0))):
        policy = NewTiny(width=32, blocks=1, smallest_scale=smallest).build(env.spec(), episodes, seed=1)
        moved = policy.proprioception.normalize(turned) - policy.proprioception.normalize(state)
        assert bounds[0] <= float(moved[0, roll]) <= bounds[1]
    with pytest.raises(UserError, match="smallest_scale is 0"):
        NewTiny(smallest_scale=0.0)


# -- joints ------------------------------------------------------------------------------------------------------------

JOINTS = spec_of("so101", image_size=16)


@pytest.fixture
def of_joints() -> TinyVLA:
    """Of two steps in which the first joint moved by 0.4 rad and the others hardly."""
    action, zeros = np.zeros((2, 6), np.float32), np.zeros(2, np.int64)
    action[1, 0] = 0.4
    images = {"front": np.zeros((2, 16, 16, 3), np.uint8)}
    episodes = Demonstrations(images, action + 1e-4, zeros, np.arange(2), action, zeros, zeros, JOINTS.tasks, 25.0)
    return NewTinyOfJoints(horizon=3, width=16, blocks=1).build(JOINTS, episodes, seed=1).eval()


def acted(policy):
    images = {"front": np.zeros((1, 16, 16, 3), np.uint8)}
    obs = Observation(images, np.zeros((1, 6), np.float32), np.zeros(1, int), np.zeros(1, int))
    return policy.act(policy.encode(obs), {}, "eval", torch.Generator().manual_seed(0))[0].action


def test_actions_and_states_are_in_units_of_what_was_demonstrated(of_joints):
    assert of_joints.action_scale.scale == pytest.approx((np.sqrt(0.08), *(0.05,) * 5))
    assert of_joints.action_scale.offset[0] == pytest.approx(0.2)
    assert of_joints.proprioception.scale[1] == 0.05


def test_a_checkpoint_keeps_the_scale_an_older_one_has_the_bounds(of_joints, tmp_path):
    of_joints.save_pretrained(tmp_path)
    assert torch.equal(acted(load_policy(tmp_path)), acted(of_joints))
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["action_scale"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert load_policy(tmp_path).action_scale == Affine.from_bounds(JOINTS.action)


def test_the_config_imitates_fifty_episodes_in_chunks_for_real_time():
    recipe = load_config("so101.py:imitate")
    assert isinstance(recipe.new, NewTinyOfJoints) and recipe.new.horizon * JOINTS.control_dt == pytest.approx(0.64)
    assert recipe.imitation.demonstrations == 50 and recipe.env.spec().action == JOINTS.action


# -- a small SmolVLA from nothing --------------------------------------------------------------------------------------

LIFT = EnvConfig("lift")
SHAPE = SmolVLAShape(
    vision=VisionShape(32, 2, 2, 64, image_size=64, patch_size=16),
    text=TextShape(1, 32, 2, 2, num_key_value_heads=1, head_dim=16, intermediate_size=64),
    pixel_shuffle=1,
    expert_width=24,
    expert_layers=2,
    chunk=3,
    action_size=4,
    state_size=8,
    picture=(64, 64),
)
NEW = NewSmolVLA(SHAPE, VLAOptions(horizon=2))
PI05 = Pi05Shape(
    vision=Siglip(32, 64, num_hidden_layers=2, num_attention_heads=2, patch_size=16, image_size=64),
    language=Gemma(32, 64, num_hidden_layers=2, num_attention_heads=2, head_dim=16, vocab_size=1),
    expert_hidden_size=24,
    expert_intermediate_size=48,
    chunk=3,
    action_size=4,
    state_size=8,
)


@pytest.fixture(scope="module")
def recorded() -> Demonstrations:
    return imitate_dataset.collect(LIFT, 2, seed=1)


def test_the_vision_language_model_learns_to_point_and_no_expert(recorded, monkeypatch):
    errors: list[float] = []
    ground, note = imitate.ground, lambda step, info: errors.append(info["pointing_error"])
    monkeypatch.setattr(imitate, "ground", lambda *given: ground(*given[:-1], note))
    policy = NEW.build(LIFT.spec(), recorded, seed=3)
    assert isinstance(policy, SmolVLA) and policy.horizon == 2 and policy.chunk_length == 3
    torch.testing.assert_close(torch.tensor(policy.state_scale.offset).float(), torch.tensor(recorded.state.mean(0)))
    before = {name: item.detach().clone() for name, item in policy.state_dict().items()}
    config = GroundingConfig(scenes=64, fit=FitConfig(steps=40, batch=32, lr=3e-3, warmup=5))
    grounded = grounded_policy(LIFT, recorded, NEW, config, seed=3)
    after = grounded.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("vlm_with_expert.vlm." in name for name in changed)
    assert np.mean(errors[-10:]) < 0.8 * np.mean(errors[:5])  # it remembers 64 scenes
    assert set(grounded.trainable()) == {name for name, item in grounded.named_parameters() if item.requires_grad}


def test_a_small_pi05_learns_to_point_as_well_and_its_numbers_begin_as_waves(recorded):
    new, scenes = NewPi05(PI05, VLAOptions(horizon=2)), GroundingConfig(scenes=8, fit=FitConfig(steps=2, batch=4))
    policy = grounded_policy(LIFT, recorded, new, scenes, seed=3)
    before = new.build(LIFT.spec(), recorded, seed=3).state_dict()
    changed = {name for name, item in policy.state_dict().items() if not torch.equal(item, before[name])}
    assert changed and all(".model.vlm." in f".{name}" for name in changed)
    reach = policy.state_scale.normalize(torch.as_tensor(recorded.state))
    assert -0.81 < reach.min() < -0.79 and 0.79 < reach.max() < 0.81, "a quarter of the range is left"
    first = policy.prompts.numbers[0][0]
    words = before["network.model.vlm.language_model.embed_tokens.weight"][first : first + 257]
    near, far = ((words[i:] - words[: len(words) - i]).norm(dim=1) for i in (1, 64))
    assert near.max() < 0.5 * far.min()


@pytest.mark.parametrize("size", [8, 7])  # an odd one is filled
def test_the_prompts_of_a_small_pi05_tell_the_state_in_them(recorded, size):
    policy, state = NewPi05(PI05).build(LIFT.spec(), recorded, seed=3), 2.0 * torch.rand(2, 8) - 1.0
    prompts = policy.prompt_of(torch.tensor([0, 1]), state)
    pointing = PointingVLM(policy.network, size)
    torch.nn.init.zeros_(pointing.words.weight)
    torch.nn.init.constant_(pointing.words.bias, 0.25)
    images, state = torch.zeros(2, 64, 64, 3, dtype=torch.uint8), state[:, :size]
    found = pointing(images, *prompts, state)
    off = torch.cat([0.25 - state, torch.zeros(2, 8 - size)], 1)
    torch.testing.assert_close(found.uv[:, 3:] - found.uv[:, 1:2], off.unflatten(1, (4, 2)))
    assert found.logits.shape[:2] == (2, 7)
    assert pointing(images, *prompts).uv.shape == (2, 3, 2), "without a state there is nothing to tell"


def test_a_small_openvlas_placeholders_learn_the_state_as_well(recorded):
    """And what it reads of a demonstrated state is not clipped."""
    sizes = replace(OpenVLAShape.small(16, 64, 32, 8, (2, 1)), state=8, head=Regression(4, hidden=16))
    new = NewOpenVLA(sizes, OpenVLAOptions(decoding=Parallel(2)))
    policy = new.build(LIFT.spec(), recorded, seed=3)
    assert policy.state_scale.normalize(torch.as_tensor(recorded.state)).abs().max() < 0.81
    pointing = PointingOpenVLA(policy.network, 8)
    torch.nn.init.zeros_(pointing.slots.weight)
    torch.nn.init.constant_(pointing.slots.bias, 0.25)
    named = (item[:2] for item in policy.prompts.encode(LIFT.spec().tasks))
    torch.manual_seed(0)
    found = pointing(torch.zeros(2, 64, 64, 3, dtype=torch.uint8), *named)
    torch.manual_seed(0)
    state = 2.0 * torch.rand(2, 8) - 1.0
    torch.testing.assert_close(found.uv[:, 3:] - found.uv[:, 1:2], (0.25 - state).unflatten(1, (4, 2)))
    assert found.logits.shape == (2, 7, 4)
    scenes = GroundingConfig(scenes=8, fit=FitConfig(steps=2, batch=4))
    grounded, before = grounded_policy(LIFT, recorded, new, scenes, seed=3), policy.state_dict()
    changed = {name for name, item in grounded.state_dict().items() if not torch.equal(item, before[name])}
    assert "network.proprio_projector.fc1.weight" in changed and not any("action_head" in name for name in changed)


def test_states_that_are_off_lead_to_the_same_actions_anew_in_every_pass(recorded, monkeypatch):
    relative = (True, True, False, False)
    off = displaced(recorded, relative, 0.5, np.random.default_rng(0))
    moved = off.state - recorded.state
    assert np.array_equal(off.action, recorded.action) and not moved[:, 2:].any()
    spread = moved[:, :2].std(0) / recorded.state[:, :2].std(0)
    assert (np.abs(spread - 0.5) < 4 * 0.5 / np.sqrt(2 * len(moved))).all(), "four standard errors"
    seen = []
    monkeypatch.setattr(imitate, "imitate", lambda policy, blocks, *_: seen.extend(islice(blocks, 2)))
    policy = NewSmolVLA(SHAPE, VLAOptions(horizon=2, relative=relative)).build(LIFT.spec(), recorded, 1)
    imitate.imitate_policy(policy, recorded, RelativeImitationConfig(0, stride=1, state_noise=0.5), 1)
    targets = [made_absolute(chunks.features, policy.action_scale.unnormalize(chunks.actions)) for chunks, _ in seen]
    whole = torch.as_tensor(recorded.chunks(policy.chunk_length)[0])
    for (chunks, _), target in zip(seen, targets, strict=True):
        torch.testing.assert_close(target, whole, rtol=0, atol=1e-5)
        state = policy.state_scale.unnormalize(chunks.features["state"])[:, :2]
        torch.testing.assert_close(state, chunks.features[ORIGIN][:, :2], rtol=0, atol=1e-5)
    assert not seen[0][0].actions.allclose(seen[1][0].actions)
    with pytest.raises(UserError, match=r"state_noise .* those of this policy are absolute"):
        imitate.imitate_policy(
            NEW.build(LIFT.spec(), recorded, 1), recorded, RelativeImitationConfig(state_noise=0.5), 1
        )


def test_what_begins_at_zero_stays_zero(recorded):
    gates = [item for name, item in NewPi05(PI05).build(LIFT.spec(), recorded, 1).named_parameters() if "dense" in name]
    assert gates and not any(item.any() for item in gates)


def test_the_same_seed_gives_the_same_weights(recorded):
    one, two, other = (NEW.build(LIFT.spec(), recorded, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
