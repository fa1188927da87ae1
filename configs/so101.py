"""The SO-101: policies by imitation of scripted episodes, in chunks of 16 actions (0.64 s at 25 Hz) or 20."""

from dataclasses import replace

from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.smolvla.shape import SmolVLAShape, TextShape, VisionShape
from vla_rl.policies.vla.options import VLAOptions
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.evaluators import EvaluationConfig
from vla_rl.recipes.imitate import Imitate, NewSmolVLAOfJoints, NewTiny, NewTinyOfJoints
from vla_rl.recipes.imitate_dataset import ImitateDataset
from vla_rl.training.fit import FitConfig, GroundingConfig, ImitationConfig, RelativeImitationConfig

ENV = EnvConfig("so101")


def imitate() -> Imitate:
    """A flow policy whose chunks are long enough to be executed while the next one is computed."""
    return Imitate(
        env=ENV,
        new=NewTinyOfJoints(horizon=16),
        grounding=GroundingConfig(scenes=6000, fit=FitConfig(steps=1000, batch=64, lr=2e-3)),
        imitation=ImitationConfig(50, stride=1, fit=FitConfig(steps=5000, batch=64, lr=1e-3)),
    )


def smolvla() -> Imitate:
    """A SmolVLA of half a million random weights, in chunks of 16 actions as well."""
    new = NewSmolVLAOfJoints(
        shape=replace(
            SmolVLAShape.small(6, 6, chunk=16),
            vision=VisionShape(64, 2, 2, 192, image_size=64, patch_size=8),
            text=TextShape(1, 96, 2, 4, num_key_value_heads=2, head_dim=24, intermediate_size=192),
            expert_width=96,
            expert_layers=2,
        ),
        options=VLAOptions(horizon=16, sampler=FlowSampler(Ode(), AllSteps(), 10)),
    )
    return Imitate(
        env=ENV,
        new=new,
        grounding=GroundingConfig(scenes=4000, fit=FitConfig(steps=1000, batch=64, lr=2e-3)),
        imitation=RelativeImitationConfig(50, stride=1, draws=1, fit=FitConfig(steps=1500, batch=64, lr=1e-3)),
        evaluation=EvaluationConfig(validation=64),
    )


def smolvla_relative() -> Imitate:
    """The same with actions relative to the joints at the decision, the gripper's absolute: LeRobot's default.

    Without noise on these joints it would not correct where it is (docs/results/simulators.md).
    """
    config = smolvla()
    assert isinstance(config.new, NewSmolVLAOfJoints)
    options = replace(config.new.options, relative=(True,) * 5 + (False,))
    imitation = replace(config.imitation, state_noise=1 / 3)  # type: ignore[call-arg]  # of a RelativeImitationConfig
    return replace(config, new=replace(config.new, options=options), imitation=imitation)


def from_recording() -> ImitateDataset:
    """The same policy from episodes that `vla-rl robot record` has recorded, its sight included: --dataset FOLDER."""
    return ImitateDataset(
        env=ENV,
        new=NewTinyOfJoints(horizon=16, width=384, sampler=FlowSampler(Ode(), AllSteps(), 10)),
        imitation=ImitationConfig(0, stride=1, draws=4, fit=FitConfig(steps=5000, batch=64, lr=1e-3)),
    )


def imitate_more() -> Imitate:
    """Seven hundred episodes, a wider network and ten steps of the flow: chunks of 20, for delays of up to 10 steps."""
    sampler = FlowSampler(Ode(), AllSteps(), 10)
    return Imitate(
        env=ENV,
        new=NewTiny(20, condition=256, width=512, sampler=sampler, smallest_scale=0.1),
        grounding=GroundingConfig(scenes=2500, fit=FitConfig(steps=350, batch=64, lr=2e-3)),
        imitation=ImitationConfig(700, stride=1, fit=FitConfig(steps=10000, batch=128, lr=1e-3)),
    )
