"""DSRL: targets and gradients by hand, distillation, what it refuses, resuming, and a known optimum."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.latent import toy_base
from tests.toys import bandit, deployed, seeded
from vla_rl.algorithms.dsrl import DSRLConfig, NoiseAliasedConfig
from vla_rl.contract.batch import Transitions
from vla_rl.contract.errors import UserError
from vla_rl.experience.replay import Replay
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.latent_noise import SquashedLatent, SquashedLatentConfig

HEAD = HeadConfig(width=32)
SMALL: dict[str, Any] = {
    "batch": 64,
    "utd_ratio": 1.0,
    "learning_starts": 1,
    "critic_warmup": 20,
    "policy_delay": 1,
    "num_critics": 3,
    "lr": 3e-3,
    "critic_lr": 3e-3,
    "temperature_lr": 1e-2,
    "target_entropy": -3.0,
}
SAC, ALIASED = DSRLConfig(**SMALL), NoiseAliasedConfig(**SMALL, distillations=2)
BOTH = pytest.mark.parametrize("config", [SAC, ALIASED], ids=["sac", "aliased"])


@pytest.fixture(scope="module")
def base():
    return toy_base()


def learner(base, config=SAC) -> Any:
    torch.manual_seed(0)
    policy = SquashedLatent(base, SquashedLatentConfig(HEAD))
    for name, parameter in policy.named_parameters():
        if name.startswith("actor.last"):
            torch.nn.init.normal_(parameter, std=0.2)
    critic = QEnsemble({"state": 1}, 2, config.num_critics, HEAD)
    return config.build(policy, policy.trainable(), critic, Replay(4096, 0.9), seeded(2))


def batch(size: int = 32, **changes: Any) -> Transitions:
    g = seeded(5)
    parts: dict[str, Any] = {
        "features": {"state": torch.randn(size, 1, generator=g)},
        "sample": torch.rand(size, 1, 2, generator=g) * 3 - 1.5,
        "executed": torch.rand(size, 1, 2, generator=g) * 2 - 1,
        "count": torch.ones(size, dtype=torch.long),
        "reward": torch.randn(size, generator=g),
        "discount": torch.tensor([0.0, 0.9, 0.81, 0.59049]).repeat(size // 4),
        "next_features": {"state": torch.randn(size, 1, generator=g)},
        "returns": torch.zeros(size),
        "intervened": torch.zeros(size, dtype=torch.bool),
        **{name: torch.zeros(size, dtype=torch.long) for name in ("version", "task", "robot")},
    }
    return Transitions(**{**parts, **changes})


def drawn(made: Any, features: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The noise, its density and the critics that the learner's generator draws next; the generator is not advanced."""
    g = torch.Generator()
    g.set_state(made.generator.get_state())
    mean, log_std = made.policy.actor.distribution(features)
    u = mean + log_std.exp() * torch.randn(mean.shape, generator=g)
    normal = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
    density = (normal - torch.log(1 - torch.tanh(u).square())).sum(-1)
    return torch.tanh(u), density, torch.randperm(made.critic.num_critics, generator=g)[:2]


def test_the_target_by_hand(base):
    made, given = learner(base), batch()
    for parameter in made.target_critic.parameters():
        parameter.data.add_(0.1)  # not those of the critic
    choice, density, critics = drawn(made, given.next_features)
    minimum = made.target_critic(given.next_features, choice)[critics].amin(0)
    expected = given.reward + given.discount * (minimum - 0.1 * density)
    torch.testing.assert_close(made.target(given), expected.detach(), atol=1e-4, rtol=1e-4)


def test_the_aliased_target_by_hand(base):
    made, given = learner(base, ALIASED), batch()
    choice, _, critics = drawn(made, given.next_features)
    sampler, field = base.sampler, base.field(given.next_features)
    action = sampler.deterministic(field, 1.5 * choice).clamp(-1, 1)
    expected = given.reward + given.discount * made.target_critic(given.next_features, action)[critics].amin(0)
    torch.testing.assert_close(made.target(given), expected.detach(), atol=1e-5, rtol=1e-5)


@BOTH
def test_the_actor_s_gradient_by_hand(base, config):
    made, given = learner(base, config), batch()
    critic = made.critic if config is SAC else made.noise_critic
    for parameter in critic.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=seeded(1)))
    choice, density, _ = drawn(made, given.features)
    loss = (0.1 * density - critic(given.features, choice).mean(0)).mean()
    expected = torch.autograd.grad(loss, list(made.learnt.values()))
    found, info = made.actor_loss(given)
    torch.testing.assert_close(found, loss, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(torch.autograd.grad(found, list(made.learnt.values())), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
    assert info["policy/entropy"] == pytest.approx(-density.mean().item() / 2, abs=1e-3)


def test_critics_get_noise_and_actions(base):
    given = batch()
    assert torch.equal(learner(base).critic_action(given), given.sample[:, 0] / 1.5)
    assert torch.equal(learner(base, ALIASED).critic_action(given), given.executed[:, 0])


def test_critics_of_noise_refuse_what_has_none(base):
    """Demonstrations and interventions train critics of actions only."""
    demonstrated = batch(sample=torch.zeros(32, 1, 2))
    corrected = batch(intervened=torch.arange(32) == 3)
    for given, count in ((demonstrated, 32), (corrected, 1)):
        with pytest.raises(UserError, match=f"{count} of 32 decisions.*share to 0, or choose the noise-aliased"):
            learner(base).critic_step(given)
        assert math.isfinite(learner(base, ALIASED).critic_step(given)["critic/loss"])


@pytest.mark.full
def test_noise_critics_equal_action_critics_after_the_decoder(base):
    """Q^W(o, w) = Q^A(o, g(o, w)) for every critic after distillation, which does not change Q^A and the actor."""
    made = learner(base, replace(ALIASED, critic_lr=5e-3))
    for parameter in made.critic.parameters():
        parameter.data.mul_(1.5)  # more to learn than a plane
    frozen = copy.deepcopy(made.critic)
    g = seeded(11)
    for _ in range(600):
        made.distil({"state": 2 * torch.rand(128, 1, generator=g) - 1})
    state = {"state": 2 * torch.rand(2000, 1, generator=g) - 1}
    w = torch.randn(2000, 2, generator=g).clamp(-1.5, 1.5)
    with torch.no_grad():
        wanted = frozen(state, made.policy.decode(state, w))
        found = made.noise_critic(state, w / 1.5)
    missing = (found - wanted).square().mean(1) / wanted.var(1)
    assert (missing < 0.02).all(), missing
    assert (wanted[0] - wanted[1]).square().mean() > 10 * (found - wanted).square().mean()
    assert all(torch.equal(a, b) for a, b in zip(made.critic.parameters(), frozen.parameters(), strict=True))


def test_distillation_is_at_noise_that_the_actor_can_choose(base, monkeypatch):
    made, asked = learner(base, ALIASED), []
    forward = made.noise_critic.forward
    monkeypatch.setattr(made.noise_critic, "forward", lambda o, a: asked.append(a) or forward(o, a))
    made.distil({"state": torch.zeros(4000, 1)})
    w = torch.cat(asked)
    assert w.abs().max() == 1.0
    assert float((w == 1.0).float().mean()) == pytest.approx(0.0668, abs=0.01)
    assert float((1.5 * w)[w.abs() < 1].std()) == pytest.approx(0.743, abs=0.03)  # of N(0, 1) within +-1.5


def test_every_step_distils_as_often_as_configured(base, monkeypatch):
    made, count = learner(base, replace(ALIASED, distillations=4)), []
    monkeypatch.setattr(made, "distil", lambda features: count.append(1) or {"critic/distillation_loss": 1.0})
    made.critic_step(batch())
    assert len(count) == 4


@pytest.mark.parametrize("config", [SAC, pytest.param(ALIASED, marks=pytest.mark.full)], ids=["sac", "aliased"])
def test_reaches_the_optimum_of_a_bandit(base, config):
    made, g = learner(base, replace(config, lr=6e-3, critic_lr=6e-3)), seeded(1)
    assert deployed(made.policy) < -0.15
    frozen = copy.deepcopy(base.state_dict())
    for _ in range(5):
        made.update(bandit(made.policy, 40, g))
    assert deployed(made.policy) > -0.02 and made.steps == 200
    assert all(torch.equal(item, frozen[name]) for name, item in base.state_dict().items())


def test_noise_critics_have_the_critics_input_statistics(base):
    made = learner(base, replace(ALIASED, learning_starts=32, utd_ratio=0.05))
    made.update(bandit(made.policy, 64, seeded(1)))
    assert torch.equal(made.noise_critic.inputs.std, made.critic.inputs.std)
    assert float(made.critic.inputs.std) == pytest.approx(0.577, abs=0.1)
