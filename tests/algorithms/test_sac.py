"""SAC and RLPD: targets, actor and temperature by hand, the true gradient, resuming, known optima."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from sims.catalog import make
from tests.off_policy_toys import Scripted, Table, critics, env_spec, recorded, regret, squashed, transitions
from tests.toys import bandit, deployed, seeded
from vla_rl.algorithms.sac import SAC, RLPDConfig, SACConfig
from vla_rl.experience.mixture import Mixture
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig

QUICK = SACConfig(
    batch=128,
    learning_starts=1,
    lr=3e-3,
    critic_lr=3e-3,
    tau=0.02,
    temperature=0.1,
    temperature_lr=1e-2,
)


def by_hand(num_critics: int = 2, slope: float = 0.0, **numbers: float) -> SAC:
    policy, config = Scripted(), replace(SACConfig(num_critics=num_critics), **numbers)
    parameters = {"nothing": torch.nn.Parameter(torch.zeros(()))}
    return SAC(policy, parameters, Table(num_critics, slope), Replay(8, 0.9), config, seeded())  # type: ignore[arg-type]


def test_the_target_by_hand():
    next_features = {"q": torch.tensor([[2.0, 3.0]]), "a": torch.zeros(1, 1), "logp": torch.tensor([-1.5])}
    batch = transitions(reward=torch.tensor([0.5]), discount=torch.tensor([0.81]), next_features=next_features)
    # 0.5 + 0.81 (min(2, 3) + 0.4 * 1.5)
    torch.testing.assert_close(by_hand(temperature=0.4).target(batch), torch.tensor([2.606]))
    ended = transitions(reward=torch.tensor([0.5]), discount=torch.zeros(1), next_features=next_features)
    torch.testing.assert_close(by_hand(temperature=0.4).target(ended), torch.tensor([0.5]))


def test_the_actor_loss_by_hand_and_its_entropy_is_per_entry():
    features = {"q": torch.tensor([[2.0, 3.0]]), "a": torch.zeros(1, 4), "logp": torch.tensor([-1.5])}
    loss, info = by_hand(temperature=0.4).actor_loss(transitions(features=features))
    torch.testing.assert_close(loss, torch.tensor(0.4 * -1.5 - 2.5))
    assert info["policy/entropy"] == pytest.approx(1.5 / 4)


@pytest.mark.parametrize(("logp", "wider"), [(1.0, True), (3.0, True), (0.0, False), (-2.0, False)])
def test_the_temperature_follows_the_entropys_target(logp, wider):
    # Two entries, a target of -0.25 each: the entropy -logp / 2 is below it when logp > 0.5.
    sac = by_hand(temperature=0.4, target_entropy=-0.25)
    made = {"q": torch.zeros(1, 2), "a": torch.zeros(1, 2), "logp": logp + sac.parameters["nothing"][None]}
    info = sac.actor_step(transitions(features=made))
    assert (info["policy/temperature"] > 0.4) == wider
    expected = 0.4 * (-logp / 2 + 0.25)
    assert sac.log_temperature.grad is not None and float(sac.log_temperature.grad) == pytest.approx(expected)


class Valley(torch.nn.Module):
    """Two critics of one action: ``-(a - 0.3)^2`` and ``a / 2``."""

    num_critics = 2

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(()))

    def forward(self, features: object, action: torch.Tensor) -> torch.Tensor:
        return torch.stack([-(action[:, 0] - 0.3).square(), 0.5 * action[:, 0]])


def test_the_actors_gradient_is_that_of_the_expectation():
    policy = squashed(env_spec(dims=1), std=0.6).double()
    with torch.no_grad():
        policy.head.last.bias[0] = 0.4
    config = SACConfig(temperature=0.2)
    sac = SAC(policy, policy.trainable(), Valley(), Replay(8, 0.9), config, seeded(3))  # type: ignore[arg-type]
    features = {"state": torch.full((40_000, 1), 0.3, dtype=torch.float64)}
    loss, _ = sac.actor_loss(transitions(features=features))
    (gradient,) = torch.autograd.grad(loss, policy.head.last.bias)

    mean, log_std = (item[0, 0] for item in policy.head.distribution({"state": features["state"][:1]}))
    xi = torch.linspace(-7, 7, 4001, dtype=torch.float64)
    weight = torch.exp(-0.5 * xi.square()) / torch.exp(-0.5 * xi.square()).sum()
    action = torch.tanh(mean + log_std.exp() * xi)
    density = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform()]).log_prob(action)
    value = (-(action - 0.3).square() + 0.5 * action) / 2
    truth = (weight * (0.2 * density - value)).sum()
    (expected,) = torch.autograd.grad(truth, policy.head.last.bias)
    assert expected.abs().min() > 0.02
    torch.testing.assert_close(float(loss.detach()), float(truth.detach()), rtol=0, atol=5e-3)
    torch.testing.assert_close(gradient, expected, rtol=0.05, atol=2e-3)


def learner(config: SACConfig = QUICK, replay: object = None) -> SAC:
    policy = squashed(env_spec())
    replay = replay or Replay(20_000, 0.9)
    return config.build(policy, policy.trainable(), critics(policy, config.num_critics), replay, seeded())  # type: ignore[arg-type]


@pytest.mark.full
def test_it_reaches_the_optimum_with_the_target_entropy():
    fast = replace(QUICK, lr=1e-2, critic_lr=1e-2, temperature_lr=3e-2, tau=0.05, batch=64)
    sac, generator = learner(fast), seeded(1)
    assert deployed(sac.policy) < -0.2
    for _ in range(10):
        metrics = sac.update(bandit(sac.policy, 40, generator))
    assert deployed(sac.policy) > -0.02
    assert metrics["policy/entropy"] == pytest.approx(-1.0, abs=0.2)
    # exp(-d^2 / alpha) is a normal density of variance alpha / 2, whose entropy is log(pi e alpha) / 2 per entry.
    assert metrics["policy/temperature"] == pytest.approx(math.exp(-2.0) / (math.pi * math.e), rel=0.4)


@pytest.mark.full
def test_it_reaches_the_optimum_of_the_point_mass():
    env = make("point_mass", num_envs=32)
    policy = squashed(env.spec)
    torch.manual_seed(0)
    critic = QEnsemble({"state": 2}, 2, 2, HeadConfig(width=64))
    config = replace(QUICK, utd_ratio=0.25, temperature=0.1)
    sac = config.build(policy, policy.trainable(), critic, Replay(20_000, 0.9), seeded())
    source = RolloutSource(env, policy, 16, SeedStream(0, 10**9), seeded(1))
    assert regret(policy)[1] < 0.2
    for _ in range(9):
        sac.update(source.next())
    missing, success = regret(policy)
    assert missing < 0.4 and success > 0.9


def test_rlpds_actor_steps_after_the_last_of_its_critic_steps():
    replay = Replay(5000, 0.9)
    replay.add(recorded(64, seeded(4)))
    config = replace(RLPDConfig(), batch=8, num_critics=2, critic_warmup=25)
    rlpd = learner(config, replay)
    steps = [step for step in range(1, 81) if "policy/loss" in rlpd.step()]
    assert steps == [40, 60, 80], "after 20, 40, ... critic steps, of which the first 25 are the warm-up"


@pytest.mark.full
def test_rlpd_learns_from_recorded_and_new_decisions_alike():
    parts = {"online": Replay(5000, 0.9), "demonstrations": Replay(5000, 0.9)}
    parts["demonstrations"].add(recorded(256, seeded(4)))
    config = RLPDConfig()
    assert (config.num_critics, config.num_min_q, config.utd_ratio, config.policy_delay) == (10, 2, 20.0, 20)
    quick = replace(config, batch=128, learning_starts=1, num_critics=4, lr=1e-2, critic_lr=3e-3, temperature_lr=1e-2)
    replay = Mixture(parts, {"online": 0.5, "demonstrations": 0.5})
    rlpd, generator = learner(replace(quick, utd_ratio=4.0, policy_delay=4, tau=0.02), replay), seeded(1)
    for _ in range(16):
        rlpd.update(bandit(rlpd.policy, 16, generator))
    assert replay.counts(128) == {"online": 64, "demonstrations": 64}
    assert rlpd.steps == 16 * 16 * 4
    assert deployed(rlpd.policy) > -0.03
