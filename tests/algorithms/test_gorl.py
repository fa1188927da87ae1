"""GoRL: the prior's penalty, the refit from the fixed prior, stages, several processes, resuming, a known optimum."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from tests.latent import toy_base
from tests.toys import TwoProcesses, bandit, columns, deployed, seeded
from vla_rl.algorithms.gorl import GoRL, GoRLConfig, RefitConfig, prior_kl
from vla_rl.contract.batch import Rollout
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import AllSteps, FlowSampler, Ode
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.latent_noise import GaussianLatent, LatentConfig

CONFIG = GoRLConfig(
    epochs=4,
    minibatch=128,
    lr=3e-3,
    critic_lr=3e-3,
    lr_bounds=(1e-5, 1e-2),
    critic_warmup=1,
    target_kl=0.1,
    iterations=10,
    window=3,
    refit=RefitConfig(epochs=25, lr=2e-3),
)


def learner(config: GoRLConfig = CONFIG, reducer: Any = None, dtype: torch.dtype = torch.float32) -> GoRL:
    torch.manual_seed(0)
    policy = GaussianLatent(toy_base(std=0.3).to(dtype), LatentConfig(HeadConfig(width=32))).to(dtype)
    critic = ValueCritic({"state": 1}, width=16).to(dtype)
    return config.build(policy, policy.trainable(), critic, seeded(), reducer)


def test_the_penalty_is_the_kl_to_the_prior_and_0_at_the_prior():
    g = seeded()
    mean, raw = torch.randn(2, 5, 1, 3, generator=g, dtype=torch.float64)
    params = {"mean": mean, "std": raw.exp()}
    law, prior = Normal(mean, raw.exp()), Normal(torch.zeros_like(mean), torch.ones_like(mean))
    torch.testing.assert_close(prior_kl(params), kl_divergence(law, prior).sum((1, 2)))
    mean, log_std = mean.clone().requires_grad_(), raw.clone().requires_grad_()
    adam = torch.optim.Adam([mean, log_std], 0.05)
    for _ in range(400):
        adam.zero_grad()
        prior_kl({"mean": mean, "std": log_std.exp()}).sum().backward()
        adam.step()
    assert mean.abs().max() < 1e-3 and (log_std.exp() - 1).abs().max() < 1e-3


def test_the_loss_is_ppo_s_and_the_penalty():
    made, plain = learner(replace(CONFIG, prior=0.5)), learner(replace(CONFIG, prior=0.0))
    batch, _ = made._make_batch(bandit(made.policy, 16, seeded(1)))
    made.policy.actor.last.bias.data.fill_(0.3)
    new = made.policy.log_prob(batch.features, batch.sample, {})
    loss, clipped = made.policy_loss(batch, new)
    alone, _ = plain.policy_loss(batch, new)
    assert (loss - alone).item() == pytest.approx(0.5 * 0.5 * 2 * 0.3**2, rel=1e-4)  # two entries, mean .3, std 1
    assert clipped.shape == (16,)


def test_ppo_leaves_the_decoder_and_the_refit_leaves_the_encoder():
    made = learner(replace(CONFIG, iterations=2, critic_warmup=0))
    decoder = copy.deepcopy(made.policy.base.state_dict())
    made.update(bandit(made.policy, 64, seeded(1)))
    assert all(torch.equal(item, decoder[name]) for name, item in made.policy.base.state_dict().items())
    assert all(p.grad is None for p in made.decoder.values())
    encoder = copy.deepcopy(made.policy.state_dict())
    assert encoder["actor.last.bias"].abs().max() > 0
    assert made.refit() > 0
    assert all(torch.equal(item, encoder[name]) for name, item in made.policy.state_dict().items())
    assert not torch.equal(made.policy.base.net[0].weight, decoder["net.0.weight"])
    assert all(p.grad is None for p in made.decoder.values())


def test_the_refit_maps_the_prior_to_what_was_executed():
    """Actions of a known law, that came from noise far from the prior, are what N(0, I) leads to afterwards."""
    made = learner(replace(CONFIG, refit=RefitConfig(60, 3e-3), minibatch=256))
    made.policy.actor.last.bias.data.fill_(2.0)
    rollout = bandit(made.policy, 1024, seeded(1))
    state, g = rollout.features["state"][0], seeded(3)
    law = torch.stack([0.5 * state[:, 0], -0.4 + 0 * state[:, 0]], -1)
    executed = law + 0.1 * torch.randn(law.shape, generator=g)
    made.window = [made._refit_data(replace(rollout, executed=executed[None, :, None]))]
    made.refit()
    made.policy.base.sampler = FlowSampler(Ode(), AllSteps(), 40)  # four steps would contract the law
    given = {"state": torch.linspace(-1, 1, 2001)[:, None]}
    found = made.policy.decode(given, torch.randn(2001, 2, generator=g))
    gap = found - torch.stack([0.5 * given["state"][:, 0], torch.full((2001,), -0.4)], -1)
    assert gap.mean(0).abs().max() < 0.04 and (gap.std(0) - 0.1).abs().max() < 0.03


def test_actions_that_were_not_executed_are_not_learnt():
    made = learner()
    rollout = bandit(made.policy, 8, seeded(1))
    idle = torch.zeros(1, 8, 1, dtype=torch.bool)
    idle[0, 5:] = True
    corrected = rollout.executed.clone()
    corrected[0, 0] = 0.7  # by a person
    made.window = [made._refit_data(replace(rollout, valid=~idle, executed=corrected))]
    features, chunks, executed = made._data()
    assert executed.shape == (5, 1) and executed.all()
    assert torch.equal(features["state"], rollout.features["state"][0, :5])
    assert torch.equal(chunks[1:], rollout.executed[0, 1:5, 0]) and torch.equal(chunks[0], torch.full((2,), 0.7))


def test_a_refit_ends_every_stage_but_the_last():
    config = replace(CONFIG, iterations=3, window=2, stages=3, refit=RefitConfig(1, 1e-3))
    made, g = learner(config), seeded(1)
    windows, refits, stages = [], [], []
    for i in range(8):
        metrics = made.update(bandit(made.policy, 16, g))
        windows.append(len(made.window))
        refits += [i] if "policy/refit_loss" in metrics else []
        stages.append(metrics["policy/refits"])
        if i in (2, 5):
            mean, std = made.policy.actor({"state": torch.ones(1, 1)})
            assert not mean.any() and torch.equal(std, torch.ones(1, 2))
            assert set(made.optimizer.state) == set(made._critic_parameters.values()) and made.lr == config.lr
    assert refits == [2, 5] and windows == [1, 2, 0, 1, 2, 0, 0, 0]
    assert stages == [0, 0, 1, 1, 1, 2, 2, 2]


def test_the_best_weights_include_the_decoder():
    made = learner(replace(CONFIG, iterations=1))
    kept = {name: parameter.detach().clone() for name, parameter in made.parameters.items()}
    before = deployed(made.policy, "sample")
    for seed in range(2):
        made.update(bandit(made.policy, 64, seeded(seed)))
    assert deployed(made.policy, "sample") != before
    with torch.no_grad():
        for name, parameter in made.parameters.items():
            parameter.copy_(kept[name])
    assert deployed(made.policy, "sample") == before


@pytest.mark.full
def test_reaches_the_optimum_of_a_bandit():
    """A stage is carried into the decoder: N(0, I) itself leads to better and better actions."""
    made, g = learner(), seeded(1)
    first, plain = deployed(made.policy, "sample"), []
    for _ in range(30):
        if "policy/refit_loss" in made.update(bandit(made.policy, 256, g)):
            plain.append(deployed(made.policy, "sample"))
    assert first < -0.25 and len(plain) == 3
    assert plain[0] > 0.5 * first and plain[1] > 0.2 * first and plain[2] > -0.02, (first, plain)
    assert made.stage == 3 and deployed(made.policy) > -0.025


def test_a_run_resumed_in_the_middle_of_a_stage_is_bit_identical():
    config = replace(CONFIG, iterations=3, stages=2, refit=RefitConfig(2, 1e-3))
    whole, g = learner(config), seeded(1)
    for _ in range(2):
        whole.update(bandit(whole.policy, 32, g))
    resumed = learner(config)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for _ in range(2):
        part = bandit(whole.policy, 32, g)
        for made in (whole, resumed):
            made.update(part)
    assert whole.stage == resumed.stage == 1 and not whole.window
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name]), name
    assert deployed(whole.policy) == deployed(resumed.policy)


def test_noise_that_went_through_an_earlier_decoder_is_dropped():
    """A rollout of the stage before is older than the decoder; later in a stage, older rollouts are of that stage."""
    made, g = learner(replace(CONFIG, iterations=2, refit=RefitConfig(1, 1e-3))), seeded(1)
    dropped = []
    for version in range(5):
        made.policy.version = version
        rollout = bandit(made.policy, 16, g)
        old = replace(rollout, version=(rollout.version - 1).clamp_min(0))
        dropped.append(made.update(old)["rollout/dropped_stale"])
        if dropped[-1]:
            made.update(rollout)
    assert dropped == [0, 0, 16, 0, 16] and made.stage == 2


def test_two_processes_that_share_environments_end_as_one():
    config = replace(CONFIG, iterations=2, window=2, minibatch=3, epochs=1, refit=RefitConfig(2, 1e-3))
    config = replace(config, max_logprob_gap=1e9)  # the rollouts are all of the first policy
    alone = learner(config, dtype=torch.float64)
    draws = learner(config)
    experience = [doubled(bandit(draws.policy, 8, seeded(i))) for i in range(3)]
    pair = [learner(config, reducer, torch.float64) for reducer in TwoProcesses.pair()]

    def work(rank: int) -> None:
        for part in experience:
            pair[rank].update(columns(part, slice(0, 5) if rank == 0 else slice(5, 8)))

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(work, rank) for rank in (0, 1)]
        for part in experience:
            alone.update(part)
        for job in jobs:
            job.result(30)
    assert alone.stage == 1
    for made in pair:
        for name, parameter in alone.parameters.items():
            torch.testing.assert_close(made.parameters[name], parameter, atol=1e-9, rtol=1e-9, msg=name)


def doubled(rollout: Rollout) -> Rollout:
    features = {name: item.double() for name, item in rollout.features.items()}
    numbers = {name: getattr(rollout, name).double() for name in ("sample", "executed", "logprob", "reward")}
    final = {name: item.double() for name, item in rollout.final_features.items()}
    return replace(rollout, features=features, final_features=final, **numbers)
