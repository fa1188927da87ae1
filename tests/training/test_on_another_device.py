"""Whole runs of every algorithm on a device that is not the host: nothing of the two is mixed, and all numbers agree.

Policy, critic, learner and replay buffer are on it; the environment and all generators stay on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.elsewhere import elsewhere
from tests.policies.vla.tiny_vlas import SMOLVLA
from tests.toys import endless
from tests.visual_point_mass import VisualPointMass, tiny_vla
from vla_rl.algorithms.dppo import DPPOConfig
from vla_rl.algorithms.dsrl import DSRLConfig, NoiseAliasedConfig
from vla_rl.algorithms.gorl import GoRLConfig, RefitConfig
from vla_rl.algorithms.group_relative import GRPOConfig
from vla_rl.algorithms.offline import CalQLConfig, IQLConfig, WSRLConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.algorithms.sac import RLPDConfig, SACConfig
from vla_rl.contract.batch import OneProcess, ReplayBuffer
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.mixture import Mixture
from vla_rl.experience.replay import InMemory, Replay
from vla_rl.experience.rollout import SeedStream, WindowConfig
from vla_rl.policies.critics import QEnsemble, ValueCritic
from vla_rl.policies.diffusion import DiffusionConfig, DiffusionPolicy, DiffusionSampler
from vla_rl.policies.feed_forward import GaussianConfig, GaussianPolicy, SquashedConfig, SquashedPolicy
from vla_rl.policies.flow import AllSteps, FlowNoise, FlowSampler, FlowSde, LastStepFromNoise
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.latent_noise import GaussianLatent, LatentConfig, SquashedLatent, SquashedLatentConfig
from vla_rl.policies.normalization import Affine, RunningStatistics
from vla_rl.policies.openvla.decoding import OpenVLAOptions
from vla_rl.policies.openvla.network import OpenVLAShape, ViTShape
from vla_rl.policies.openvla.policy import OpenVLA
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual, ResidualConfig
from vla_rl.policies.smolvla.policy import SmolVLA
from vla_rl.policies.vla.options import TrainAll, VLAOptions
from vla_rl.training.checkpoint import latest_state, save_state
from vla_rl.training.fit import FitConfig, ImitationConfig, imitate
from vla_rl.training.loop import Loop, LoopConfig, PolicyStore

ENVS = 4
HEAD = HeadConfig(8, 1)
SPEC = VisualPointMass(1).spec
WINDOW = WindowConfig(num_envs=ENVS, decisions=5)
DIFFUSION = DiffusionConfig(2, 8, 8, 1)
GROUPS = GroupConfig(groups=2, size=2, ahead=1, limit=4, num_envs=ENVS)
OFF = {"batch": 8, "utd_ratio": 0.1, "learning_starts": 4, "critic_warmup": 1, "num_critics": 3, "critic": HEAD}

ON_POLICY: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "ppo": (lambda: flow(FlowSde(0.5), AllSteps()), PPOConfig(minibatch=12, critic_warmup=0), WINDOW),
    "ppo, last step": (lambda: flow(FlowSde(0.5), LastStepFromNoise()), PPOConfig(minibatch=12), WINDOW),
    "ppo of a state": (
        lambda: GaussianPolicy(SPEC, RunningStatistics(2), GaussianConfig(2, 8, 1)),
        PPOConfig(minibatch=12, critic_warmup=0),
        WINDOW,
    ),
    "ppo of a VLA's prefix": (lambda: smolvla("prefix"), PPOConfig(epochs=1, minibatch=20, critic_warmup=0), WINDOW),
    "ppo of tokens": (lambda: tokens(), PPOConfig(epochs=1, minibatch=20, critic_warmup=0), WINDOW),
    "grpo": (lambda: flow(FlowSde(0.5), AllSteps()), GRPOConfig(minibatch=8), GROUPS),
    "dppo": (
        lambda: DiffusionPolicy(
            tiny_vla(SPEC), replace(DIFFUSION, sampler=DiffusionSampler(steps=5, fine_tuned=2, floor=0.1))
        ),
        DPPOConfig(minibatch=12, critic_warmup=0),
        WINDOW,
    ),
    "residual ppo": (
        lambda: GaussianResidual(tiny_vla(SPEC), config=ResidualConfig(head=HEAD)),
        PPOConfig(minibatch=12, critic_warmup=0),
        WINDOW,
    ),
    "gorl": (
        lambda: GaussianLatent(tiny_vla(SPEC), LatentConfig(HEAD)),
        GoRLConfig(minibatch=12, critic_warmup=0, stages=1, iterations=2, window=2, refit=RefitConfig(epochs=1)),
        WINDOW,
    ),
}
OFF_POLICY: dict[str, tuple[Callable[[], Any], Any]] = {
    "residual td3": (
        lambda: DeterministicResidual(tiny_vla(SPEC), config=ResidualConfig(head=HEAD)),
        ResidualTD3Config(**OFF),
    ),
    "sac": (lambda: squashed(), SACConfig(**OFF)),
    "rlpd": (lambda: squashed(), RLPDConfig(**{**OFF, "utd_ratio": 0.2})),
    "iql": (lambda: squashed(), IQLConfig(**OFF)),
    "cal-ql": (lambda: squashed(), CalQLConfig(**OFF)),
    "wsrl": (lambda: squashed(), WSRLConfig(**OFF)),
    "dsrl": (lambda: SquashedLatent(tiny_vla(SPEC), SquashedLatentConfig(HEAD)), DSRLConfig(**OFF)),
    "dsrl, noise-aliased": (
        lambda: SquashedLatent(tiny_vla(SPEC), SquashedLatentConfig(HEAD)),
        NoiseAliasedConfig(**OFF, distillations=2),
    ),
}


def flow(schedule, placement):
    return tiny_vla(SPEC, sampler=FlowSampler(schedule, placement, 3))


def smolvla(kept: str) -> SmolVLA:
    options = VLAOptions(kept=kept, sampler=FlowSampler(FlowNoise(), AllSteps(), 3))
    return SmolVLA.new(SPEC, Affine((0.0, 0.0), (1.0, 1.0)), SMOLVLA, options)


def tokens() -> OpenVLA:
    vit = ViTShape(width=8, depth=2, heads=1, hidden=8, patch=4, patches=4)
    small = OpenVLAShape.small(width=8)
    llama = {**small.llama, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape = replace(small, llama=llama, dino=replace(vit, registers=1, classes=True), siglip=vit)
    options = OpenVLAOptions(kept="pictures", trains=TrainAll(), logprob_per="token")
    return OpenVLA.new(SPEC, Affine((0.0, 0.0), (1.0, 1.0)), shape, options)


def squashed() -> SquashedPolicy:
    return SquashedPolicy(tiny_vla(SPEC), SquashedConfig(2, head=HEAD))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_policy(name: str, device: torch.device) -> tuple[Any, Any, Any]:
    """Policy, learner and source."""
    build, algorithm, experience = ON_POLICY[name]
    torch.manual_seed(0)
    policy = build().to(device)
    critic = ValueCritic({**getattr(policy, "feature_sizes", {"state": 2}), "time": 1}, 8, 1).to(device)
    learner = algorithm.build(policy, policy.trainable(), critic, seeded(1), OneProcess())
    return policy, learner, experience.build(VisualPointMass(ENVS), policy, SeedStream(0, 999), seeded(2))


def off_policy(name: str, device: torch.device) -> tuple[Any, Any, Any]:
    """The same; half of a batch comes from a second buffer, as with demonstrations."""
    build, algorithm = OFF_POLICY[name]
    torch.manual_seed(0)
    policy = build().to(device)
    actions = getattr(policy, "horizon", 1) * SPEC.action_dim
    critic = QEnsemble({**policy.feature_sizes, "time": 1}, actions, algorithm.num_critics, HEAD).to(device)
    source = WINDOW.build(VisualPointMass(ENVS), policy, SeedStream(0, 999), seeded(2))
    recorded = Replay(200, 0.99, 2, InMemory(device))
    recorded.add(source.next())
    parts: dict[str, ReplayBuffer] = {"online": Replay(200, 0.99, 2, InMemory(device)), "recorded": recorded}
    replay = Mixture(parts, {"online": 0.5, "recorded": 0.5})
    learner = algorithm.build(policy, policy.trainable(), critic, replay, seeded(1))
    return policy, learner, source


def run(name: str, device: torch.device, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Two iterations, of which the second is also resumed; the policy and its weights on the host."""
    build = on_policy if name in ON_POLICY else off_policy
    config = LoopConfig(iterations=2, validate_every=2)

    def loop() -> tuple[Loop, Any]:
        policy, learner, source = build(name, device)
        env = VisualPointMass(2)
        validate = lambda: evaluate(env, policy, range(2)).rate  # noqa: E731
        return Loop(source, learner, PolicyStore(policy), validate, config), policy

    first, _ = loop()
    first.save = lambda iteration: (
        save_state(folder / "state", iteration, first.state_dict()) if iteration < 2 else None
    )
    first.run()
    second, policy = loop()
    second.load_state_dict(latest_state(folder / "state")[1])
    second.run()
    policy.save_pretrained(folder / "policy")
    for weights in (first, second):
        assert weights.best.iteration == first.best.iteration
    return policy, {name: item.detach().cpu() for name, item in policy.trainable().items()}


@pytest.fixture(autouse=True)
def double_precision():
    """Kernels may round differently, and an optimizer amplifies that: in double precision it stays invisible."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


OFTEN = "ppo of a state"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != OFTEN)) for name in [*ON_POLICY, *OFF_POLICY]]
)
def test_a_run_on_another_device_is_that_on_the_host(name, tmp_path):
    """Building, collecting, learning, validating, saving and resuming, up to a checkpoint that loads on the host."""
    _, expected = run(name, torch.device("cpu"), tmp_path / "here")
    with elsewhere() as device:
        policy, found = run(name, device, tmp_path / "there")
        assert {item.device for item in policy.trainable().values()} == {device}
    assert found.keys() == expected.keys() and any(item.abs().sum() > 0 for item in found.values())
    for key, item in expected.items():
        torch.testing.assert_close(found[key], item, rtol=1e-5, atol=1e-6)
    loaded = load_policy(tmp_path / "there" / "policy", SPEC)
    for key, item in loaded.trainable().items():
        assert item.device.type == "cpu" and torch.equal(item, found[key])


@pytest.mark.parametrize("name", ["ppo", "dppo"])
def test_imitation_on_another_device_is_that_on_the_host(name):
    obs = VisualPointMass(20).reset(np.arange(20), np.arange(20))
    chunks = torch.randn(20, 2, 2, generator=seeded(3)).clamp(-1, 1)
    config = ImitationConfig(draws=2, fit=FitConfig(steps=3, batch=8))

    def learn(device: torch.device) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        build = ON_POLICY[name][0] if name == "ppo" else lambda: DiffusionPolicy(tiny_vla(SPEC), DIFFUSION)
        policy = build().to(device)
        imitate(policy, endless(policy.encode(obs), chunks.to(device)), config, seeded(4))
        return {key: item.detach().cpu() for key, item in policy.trainable().items()}

    expected = learn(torch.device("cpu"))
    with elsewhere() as device:
        found = learn(device)
    for key, item in expected.items():
        torch.testing.assert_close(found[key], item, rtol=1e-5, atol=1e-6)
