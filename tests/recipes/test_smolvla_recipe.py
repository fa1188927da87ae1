"""A small SmolVLA from nothing: its vision-language model learns to point, and the rest stays as it was."""

from __future__ import annotations

import numpy as np
import torch

from vla_rl.experience.collect import collect_demonstrations
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.smolvla.shape import SmolVLAShape, TextShape, VisionShape
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.imitate import NewSmolVLA, grounded_policy
from vla_rl.training.fit import FitConfig, GroundingConfig

LIFT = EnvConfig("lift")
TINY = SmolVLAShape(
    vision=VisionShape(width=32, layers=2, heads=2, mlp=64, image=64, patch=16),
    text=TextShape(1, width=32, layers=2, heads=2, key_value_heads=1, head_size=16, mlp=64),
    pixel_shuffle=1,
    expert_width=24,
    expert_layers=2,
    chunk=3,
    action_size=4,
    state_size=8,
    picture=(64, 64),
)
NEW = NewSmolVLA(TINY, VLAOptions(horizon=2))


def episodes():
    env = LIFT.make(2)
    try:
        return collect_demonstrations(env, LIFT.make_expert().act, [1, 2], lambda done: None)
    finally:
        env.close()


def test_the_vision_language_model_learns_to_point_and_the_expert_stays():
    recorded, errors = episodes(), []
    policy = NEW.build(LIFT.spec(), recorded, seed=3)
    assert isinstance(policy, SmolVLA) and policy.horizon == 2 and policy.chunk_length == 3
    torch.testing.assert_close(torch.tensor(policy.state_scale.offset).float(), torch.tensor(recorded.state.mean(0)))
    before = {name: item.detach().clone() for name, item in policy.state_dict().items()}
    config = GroundingConfig(scenes=64, fit=FitConfig(steps=60, batch=32, lr=3e-3, warmup=5))
    grounded = grounded_policy(LIFT, recorded, _Watched(NEW, errors), config, seed=3)
    after = grounded.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("vlm_with_expert.vlm." in name for name in changed)
    assert np.mean(errors[-10:]) < 0.7 * np.mean(errors[:5])  # it remembers 64 scenes
    assert set(grounded.trainable()) == {name for name, item in grounded.named_parameters() if item.requires_grad}


class _Watched:
    """The config, with the pointing errors of every step."""

    def __init__(self, new: NewSmolVLA, errors: list[float]) -> None:
        self.build, self._new, self._errors = new.build, new, errors

    def ground(self, policy, scenes, config, generator, report) -> None:
        self._new.ground(
            policy, scenes, config, generator, lambda step, info: self._errors.append(info["pointing_error"])
        )


def test_the_same_seed_gives_the_same_weights():
    recorded = episodes()
    one, two, other = (NEW.build(LIFT.spec(), recorded, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
