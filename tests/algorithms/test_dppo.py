"""DPPO: its arithmetic by hand, its gradient against the true one, and its requirements of a policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.chains import SAMPLERS, compare, draw, network, weights
from tests.toys import ToyEncoder, bandit, seeded
from vla_rl.algorithms.dppo import DPPO, DPPOConfig, clip_shares
from vla_rl.algorithms.ppo import _Batch
from vla_rl.contract.policy import Likelihood
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.diffusion import DiffusionConfig, DiffusionPolicy, DiffusionSampler, step_entropy, step_logprob

CONFIG = DPPOConfig(critic_warmup=0, minibatch=7, lr=3e-3, lr_bounds=(1e-5, 1e-2))


def toy(sampler: DiffusionSampler | None = None) -> DiffusionPolicy:
    torch.manual_seed(0)
    config = DiffusionConfig(1, condition=8, width=16, blocks=1, sampler=sampler or DiffusionSampler())
    return DiffusionPolicy(ToyEncoder(), config)


def learner(policy, kind=DPPO, **changes) -> DPPO:
    critic = ValueCritic({"state": 1}, width=16)
    return kind(policy, policy.trainable(), critic, replace(CONFIG, **changes), seeded())


class Chain(nn.Module):
    """The 74-parameter network of ``tests/chains.py`` as a policy; ``features`` holds nothing it would read."""

    encode = initial_state = reset_state = act = kl = lambda self: None

    def __init__(self, sampler: DiffusionSampler) -> None:
        super().__init__()
        self.sampler, self.version, self.theta = sampler, 0, nn.Parameter(weights())

    def log_prob(self, features, sample, aux) -> Likelihood:
        mean, std = self.sampler.gaussians(network(self.theta), aux["points"])
        params = {"mean": mean, "std": std}
        return Likelihood(self.step_logprob(aux, params).sum(1), step_entropy(std).sum(1), params)

    def step_logprob(self, aux, params) -> Tensor:
        return step_logprob(aux["points"][:, 1:], params["mean"], params["std"])


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_clip_bounds_are_the_golden_ones():
    expected = [0.001, 0.001187, 0.001447, 0.00181, 0.002317, 0.003025, 0.004013, 0.005391, 0.007315, 0.01]
    assert [0.01 * share for share in clip_shares(10, 0.1, 3.0)] == pytest.approx(expected, abs=5e-7)
    assert clip_shares(1, 0.1, 3.0) == [1.0] and clip_shares(2, 0.25, 3.0) == pytest.approx([0.25, 1.0])


def by_hand(ratios: Tensor, advantage: Tensor, **changes) -> tuple[Tensor, Tensor]:
    """The loss and what was clipped at ``ratios`` [B,K'] and ``advantage`` [B]."""

    class Given(Chain):
        def step_logprob(self, aux, params):
            return ratios.log() - 2.0

    policy = Given(SAMPLERS["ddim"])
    dppo = learner_of(policy, **changes)
    old, none = torch.full_like(ratios, -2.0), torch.zeros(len(ratios))
    return dppo.policy_loss(
        _Batch({}, none, {}, old, advantage, torch.ones_like(none), none, none, none), Likelihood(none, none, {})
    )


def learner_of(policy: Chain, **changes) -> DPPO:
    return DPPO(policy, dict(policy.named_parameters()), nn.Linear(1, 1), replace(CONFIG, **changes), seeded())


def test_the_clipped_objective_by_hand():
    """Two steps: the first may move by a tenth of the bounds of the last, and its advantage is discounted once."""
    config = {"clip_low": 0.2, "clip_high": 0.4, "clip_first": 0.1, "gamma_denoise": 0.5}
    ratios = torch.tensor([[1.1, 1.3], [0.9, 0.5]], dtype=torch.float64)
    loss, clipped = by_hand(ratios, torch.tensor([2.0, -4.0], dtype=torch.float64), **config)
    first = (1.04 * 2.0 * 0.5 + 0.98 * -4.0 * 0.5) / 2  # 1.1 -> 1 + .04, .9 -> 1 - .02
    last = (1.3 * 2.0 + 0.8 * -4.0) / 2  # .5 -> 1 - .2
    assert loss.item() == pytest.approx(-(first + last), abs=1e-12)
    assert clipped.tolist() == [0.5, 1.0]
    loss, _ = by_hand(ratios[:, 1:], torch.tensor([2.0, -4.0], dtype=torch.float64), **config)
    assert loss.item() == pytest.approx(-last, abs=1e-12)


def test_noisier_steps_are_discounted_more():
    advantage = torch.tensor([3.0], dtype=torch.float64)
    loss, _ = by_hand(torch.ones(1, 10, dtype=torch.float64), advantage, gamma_denoise=0.99)
    assert loss.item() == pytest.approx(-3 * sum(0.99**k for k in range(10)), abs=1e-12)
    moved = torch.ones(1, 10, dtype=torch.float64)
    moved[0, 0] = 0.9999
    gap = by_hand(moved, advantage, gamma_denoise=0.99)[0] - loss
    assert gap.item() == pytest.approx(1e-4 * 3 * 0.91352, rel=1e-5)  # the golden number


# -- the gradient -----------------------------------------------------------------------------------------------------


def gradient(sampler: DiffusionSampler, monkeypatch: pytest.MonkeyPatch, gamma: float) -> tuple[float, float]:
    drawn, policy = draw(sampler, monkeypatch), Chain(sampler)
    dppo, none = learner_of(policy, gamma_denoise=gamma), torch.zeros(len(drawn.points))
    new = policy.log_prob({}, none, {"points": drawn.points})
    steps = policy.step_logprob({"points": drawn.points}, new.params).detach()
    row = _Batch({}, none, {"points": drawn.points}, steps, drawn.advantage, torch.ones_like(none), none, none, none)
    (found,) = torch.autograd.grad(-dppo.policy_loss(row, new)[0], policy.theta)
    return compare(found, drawn.gradient)


@pytest.mark.parametrize(
    "sampler",
    [pytest.param(one, id=name, marks=[pytest.mark.full] * (i > 1)) for i, (name, one) in enumerate(SAMPLERS.items())],
)
def test_without_discount_the_gradient_is_that_of_the_chain(sampler, monkeypatch):
    cosine, norm = gradient(sampler, monkeypatch, 1.0)
    assert cosine >= 0.999 and norm == pytest.approx(1, abs=0.02)


def test_a_discount_changes_the_gradient(monkeypatch):
    cosine, norm = gradient(SAMPLERS["ddim"], monkeypatch, 0.5)
    assert cosine < 0.995 or abs(norm - 1) > 0.05


# -- whole updates ----------------------------------------------------------------------------------------------------


class Watching(DPPO):
    """Keeps the largest |log ratio| of every minibatch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gaps = []

    def policy_loss(self, row, new):
        logprob = self.policy.step_logprob(row.aux, new.params)
        self.gaps.append((logprob - row.logprob).detach().abs().max().item())
        return super().policy_loss(row, new)


def test_every_steps_ratio_is_one_before_the_first_update():
    dppo = learner(toy(), Watching)
    metrics = dppo.update(bandit(dppo.policy, 49, seeded(1)))
    assert dppo.gaps[0] <= 1e-5 * math.sqrt(2) and metrics["policy/logprob_gap"] <= 1e-5 * math.sqrt(10)
    assert max(dppo.gaps[1:]) > 1e-3


def test_only_the_fine_tuned_steps_learn():
    sampler = DiffusionSampler(steps=10, fine_tuned=4)
    dppo = learner(toy(sampler))
    early = {name: p.clone() for name, p in dppo.policy.heads["early"].named_parameters()}
    late = {name: p.detach().clone() for name, p in dppo.policy.heads["late"].named_parameters()}
    experience = bandit(dppo.policy, 49, seeded(1))
    assert experience.aux["points"].shape == (1, 49, 5, 2)
    dppo.update(experience)
    assert all(torch.equal(p, early[name]) for name, p in dppo.policy.heads["early"].named_parameters())
    assert not any(torch.equal(p, late[name]) for name, p in dppo.policy.heads["late"].named_parameters())
