"""Residual TD3 and what off-policy algorithms share: targets and losses by hand, who learns when, state."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from sims.catalog import make
from tests.residuals import POINT, SMALL, StateEyes, biased_base
from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig, swapped
from vla_rl.algorithms.residual_td3 import ResidualTD3, ResidualTD3Config
from vla_rl.contract.batch import Transitions
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import Judgeable
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual
from vla_rl.training.checkpoint import latest_state, save_state

CONFIG = ResidualTD3Config(
    batch=32, update_ratio=0.5, start=10, critic_warmup=6, actor_every=2, learning_rate=1e-2, critic_learning_rate=1e-3
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Line(nn.Module):
    """A deterministic policy: every action is ``w`` times the state, not clipped by itself."""

    version = 0

    def __init__(self, w: float = 0.5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), w))

    def unused(self, *given):
        raise AssertionError("nobody acts here")

    precompute = initial_state = reset_state = act = unused

    def rsample(self, stored, generator):
        return Judgeable(stored["state"] * self.w, torch.zeros(len(stored["state"])))

    def judged(self, stored, sample, executed):
        return executed.flatten(1)


def batch(rows: int = 40, seed: int = 0, **changes) -> Transitions:
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    generator = seeded(seed)
    parts = {
        "stored": {"state": normal(rows, 2), "base_action": normal(rows, 2)},
        "sample": torch.full((rows, 1, 2), torch.nan),
        "executed": normal(rows, 1, 2),
        "reward": normal(rows),
        "discount": torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) < 0.8),
        "following": {"state": normal(rows, 2), "base_action": normal(rows, 2)},
        "returns": normal(rows),
        "intervened": torch.zeros(rows, dtype=torch.bool),
    }
    return Transitions(**{**parts, **changes})


class Recorded:
    """A memory of one batch, which is all it ever gives."""

    def __init__(self, found: Transitions | None = None) -> None:
        self.found, self.added = found or batch(), 0

    def __len__(self) -> int:
        return len(self.found.reward)

    def add(self, rollout) -> int:
        return 0

    def sample(self, size, generator):
        return self.found

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def made(policy=None, memory=None, heads: int = 4, kind=ResidualTD3, **changes):
    policy = policy or Line()
    torch.manual_seed(0)
    critic = QEnsemble({"state": 2}, 2, heads, HeadConfig(16, 1))
    config = replace(CONFIG, **changes)
    return kind(
        policy, dict(policy.named_parameters()), critic, Recorded() if memory is None else memory, config, seeded(5)
    )


def drift(module: nn.Module, seed: int = 3) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(seed)))


def learnt(critic: nn.Module) -> list[nn.Parameter]:
    """Without the statistics of what is seen."""
    return [parameter for name, parameter in critic.named_parameters() if not name.startswith("inputs.")]


# -- targets ----------------------------------------------------------------------------------------------------------


def test_the_target_by_hand():
    """Slow critics and slow policy, smoothed and clipped, the least of two heads, nothing after a termination."""
    td3, found = made(target_noise=0.3, target_clip=0.4), batch()
    drift(td3.critic), drift(td3.policy)
    for parameter in td3.target_critic.parameters():
        nn.init.normal_(parameter, generator=seeded(1))
    target = td3.target(found)
    generator = seeded(5)
    noise = 0.3 * torch.randn(40, 2, generator=generator)
    chosen = torch.randperm(4, generator=generator)[:2]
    action = np.clip(found.following["state"].numpy() * 0.5 + np.clip(noise.numpy(), -0.4, 0.4), -1, 1)
    value = td3.target_critic(found.following, torch.from_numpy(action)).detach().numpy()[chosen.numpy()]
    expected = found.reward.numpy() + found.discount.numpy() * value.min(0)
    np.testing.assert_allclose(target.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert (found.discount == 0).any() and not target.requires_grad and float(td3.policy.w.detach()[0]) != 0.5
    assert (abs(noise) > 0.4).any() and (abs(action) == 1).any() and 0.1 < (value[0] > value[1]).mean() < 0.9


def test_the_least_is_of_a_random_pair_without_replacement():
    """Of three constant heads the highest is never the least; with replacement it would be one time in nine."""
    td3 = made(heads=3, subset=2)
    for parameter in learnt(td3.target_critic):
        nn.init.zeros_(parameter)
    with torch.no_grad():
        td3.target_critic.last.bias.copy_(torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    found = torch.tensor([float(td3.least(batch(1).stored, torch.zeros(1, 2))) for _ in range(900)])
    assert (found == 3).sum() == 0
    assert float((found == 1).float().mean()) == pytest.approx(2 / 3, abs=0.06)  # four standard errors


def test_targets_are_kept_within_what_returns_can_be():
    td3 = made(value_bounds=(-0.1, 0.2))
    td3.target = lambda found: found.reward
    seen = td3.critic(td3.memory.found.stored, td3.memory.found.executed.flatten(1)).detach()
    expected = (seen - td3.memory.found.reward.clamp(-0.1, 0.2)).square().mean(1).sum()
    assert td3.critic_step(td3.memory.found)["critic_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_each_head_is_regressed_on_its_own():
    """The gradient of each is that of its own mean squared error: all that couples them is the norm's bound."""
    td3 = made(grad_norm=1e9)
    target = td3.target(td3.memory.found)
    td3.target = lambda found: target
    td3.critic_step(td3.memory.found)
    for head in range(4):
        alone = made()
        value = alone.critic(td3.memory.found.stored, td3.memory.found.executed.flatten(1))[head]
        (value - target).square().mean().backward()
        for one, two in zip(learnt(td3.critic), learnt(alone.critic), strict=True):
            torch.testing.assert_close(one.grad[head], two.grad[head], rtol=1e-4, atol=1e-6)


class Table(nn.Module):
    """Heads that are one number each."""

    heads = 10

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(3 * torch.rand(10, 1, generator=seeded()) - 1)

    def forward(self, stored, action):
        return self.values.expand(10, len(action))


def test_heads_that_begin_apart_end_together():
    """Bernoulli(1/2) targets, heads in [-1, 2] (algorithms.md 7.6): coupled heads would stay .08 to .96 apart."""
    policy, table, generator = Line(), Table(), seeded(1)
    config = OffPolicyConfig(critic_learning_rate=1e-2)
    learner = OffPolicy(policy, {"w": policy.w}, table, Recorded(), config, generator)
    learner.target = lambda found: found.reward
    assert np.ptp(table.values.detach().numpy()) > 2
    for _ in range(1200):
        coin = (torch.rand(256, generator=generator) < 0.5).float()
        learner.critic_step(SimpleNamespace(stored={}, sample=None, executed=torch.zeros(256, 1, 1), reward=coin))
    assert np.ptp(table.values.detach().numpy()) <= 0.05
    assert float(table.values.detach().mean()) == pytest.approx(0.5, abs=0.05)


# -- the actor --------------------------------------------------------------------------------------------------------


def test_the_actor_ascends_the_mean_of_all_heads_less_the_penalty():
    td3, found = made(penalty=0.7, grad_norm=1e9), batch()
    td3.actor_step(found)
    line = Line()
    action = line.rsample(found.stored, None).action
    effort = action.square().sum(1).mean()
    (-td3.critic(found.stored, action).mean() + 0.7 * effort).backward()
    torch.testing.assert_close(td3.policy.w.grad, line.w.grad)
    assert td3.actor_step(found)["effort"] > 0 and "effort" not in made().actor_step(found)


def test_critics_get_nothing_from_the_actor():
    td3 = made()
    td3.critic_step(td3.memory.found)
    before = [(p.detach().clone(), p.grad.clone()) for p in learnt(td3.critic)]
    slow = [p.clone() for p in td3.target_critic.parameters()]
    w = td3.policy.w.detach().clone()
    td3.actor_step(td3.memory.found)
    assert all(
        torch.equal(p, q) and torch.equal(p.grad, g) for p, (q, g) in zip(learnt(td3.critic), before, strict=True)
    )
    assert all(torch.equal(p, q) for p, q in zip(td3.target_critic.parameters(), slow, strict=True))
    assert all(p.requires_grad for p in learnt(td3.critic)) and not torch.equal(td3.policy.w, w)


# -- who learns when --------------------------------------------------------------------------------------------------


def decisions(number: int):
    return SimpleNamespace(valid=torch.ones(number, 1, 1, dtype=torch.bool))


def test_steps_follow_the_decisions_once_there_are_enough():
    """Half a step per decision from the tenth on; idle decisions do not count, and halves are not lost."""
    td3 = made()
    steps = [td3.update(decisions(number)) and td3.steps for number in (4, 5, 4, 1, 1, 0, 20)]
    assert steps == [0, 0, 2, 2, 3, 3, 13]
    idle = decisions(8)
    idle.valid[5:] = False
    assert td3.update(idle)["decisions"] == 5 and td3.steps == 15
    empty = made(memory=Recorded(batch(0)))
    empty.update(decisions(30))
    assert empty.steps == 0 and empty.owed == 10.5
    empty.memory.found = batch()
    empty.update(decisions(1))
    assert empty.steps == 11


def test_the_actor_rests_at_first_and_then_follows_every_other_step():
    td3, moved = made(), []
    for _ in range(12):
        before = td3.policy.w.detach().clone()
        info = td3.step()
        moved.append(not torch.equal(before, td3.policy.w))
        assert moved[-1] == ("actor_loss" in info)
    assert moved == [False] * 6 + [True, False] * 3


def test_targets_follow_slowly():
    td3 = made(target_rate=0.25, critic_warmup=0, actor_every=1)
    slow, critics = td3.slow["w"].clone(), [p.clone() for p in learnt(td3.target_critic)]
    td3.step()
    torch.testing.assert_close(td3.slow["w"], 0.75 * slow + 0.25 * td3.policy.w.detach())
    for was, p, fast in zip(critics, learnt(td3.target_critic), learnt(td3.critic), strict=True):
        torch.testing.assert_close(p, 0.75 * was + 0.25 * fast.detach())
        assert not p.requires_grad
    assert not torch.equal(td3.slow["w"], td3.policy.w)


def test_weights_are_lent_within_the_block_only():
    line = Line(0.5)
    with pytest.raises(ZeroDivisionError), swapped({"w": line.w}, {"w": torch.ones(2)}):
        assert line.w.tolist() == [1, 1]
        raise ZeroDivisionError
    assert line.w.tolist() == [0.5, 0.5]


def test_a_policy_without_gradient_or_a_subset_too_large_is_refused():
    with pytest.raises(UserError, match=r"needs a policy with rsample and judged .* but GaussianResidual lacks them"):
        made(GaussianResidual(biased_base(), StateEyes(POINT), SMALL))
    with pytest.raises(UserError, match="a subset of 5 cannot be drawn from 4 heads; choose 1 to 4"):
        made(subset=5)


@pytest.mark.parametrize("who", ["critic", "policy"])
def test_a_nan_is_named_and_its_step_not_taken(who):
    found = batch()
    td3 = made(memory=Recorded(found), critic_warmup=0)
    td3.step(), td3.step()
    if who == "critic":
        found.reward[3] = torch.nan
    else:
        td3.actor_loss = lambda sampled: (td3.policy.rsample(sampled.stored, None).action.sum() * torch.nan, {})
    module = td3.critic if who == "critic" else td3.policy
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(NonFiniteError, match=rf"the {who} gradient of .* is not finite at step 2"):
        td3.step()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


# -- state ------------------------------------------------------------------------------------------------------------


def whole(seed: int):
    """A run on the point mass, all parts of it made anew."""
    torch.manual_seed(seed)
    policy = DeterministicResidual(biased_base(), StateEyes(POINT), SMALL)
    critic = QEnsemble(policy.perceived, 2, 4, HeadConfig(16, 1))
    td3 = ResidualTD3(policy, policy.trainable(), critic, Replay(300, 0.9, 3), replace(CONFIG, start=40), seeded(seed))
    return RolloutSource(make("point_mass", num_envs=4), policy, 9, itertools.count(1), seeded(seed + 1)), td3


def test_a_saved_run_goes_on_bit_for_bit(tmp_path):
    """Statistics of what is seen, slow weights, memory, running episodes and generators included."""
    source, td3 = whole(1)
    rollouts = [source.next() for _ in range(3)]
    for rollout in rollouts:
        td3.update(rollout)
    assert td3.steps > 20 and td3.policy.delta.trunk.inputs.mean.abs().max() > 0
    save_state(tmp_path, 1, td3.state_dict())
    _, again = whole(2)
    again.load_state_dict(latest_state(tmp_path)[1])
    for _ in range(2):
        rollout = source.next()
        assert td3.update(rollout) == again.update(rollout)
    for name in ("policy", "critic", "target_critic"):
        one, two = (getattr(learner, name).state_dict() for learner in (td3, again))
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert all(torch.equal(td3.slow[name], again.slow[name]) for name in td3.slow)
    assert torch.equal(td3.generator.get_state(), again.generator.get_state())


def test_what_is_seen_is_standardised_once_and_only_the_critics_see_what_is_privileged():
    source, td3 = whole(1)
    shown = []
    for part in (td3.critic, td3.policy):
        part.calibrate = lambda stored, reducer: shown.append(set(stored))
    sample = td3.memory.sample

    def with_secret(size, generator):
        found = sample(size, generator)
        both = ({**item, "privileged/mass": torch.zeros(size, 1)} for item in (found.stored, found.following))
        return replace(found, **dict(zip(("stored", "following"), both, strict=True)))

    td3.memory.sample = with_secret
    for _ in range(4):
        td3.update(source.next())
    assert len(shown) == 2 and "privileged/mass" in shown[0] and "privileged/mass" not in shown[1]
