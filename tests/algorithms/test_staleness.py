"""Stale decisions have the decoupled objective, in PPO as in GRPO; wrong log-probs are corrected or refused."""

from __future__ import annotations

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.algorithms.ppo_learners import SDE, same, seeded, weights
from tests.algorithms.ppo_learners import learner as ppo_learner
from tests.algorithms.test_grpo import learner as grpo_learner
from tests.algorithms.test_grpo import play
from tests.toys import FlowToy, TwoProcesses, bandit
from vla_rl.algorithms.dppo import DPPO, DPPOConfig
from vla_rl.algorithms.policy_gradient import check_density, rounding_terms
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import ContractError
from vla_rl.contract.policy import Likelihood
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.flow import AllSteps, FlowSampler
from vla_rl.policies.flow_schedules import FlowNoise


def batch_of(kind: str, **changes):
    """A learner of ``kind`` and a batch of two decisions of weight 1 and advantage 2."""
    if kind == "ppo":
        learner = ppo_learner(**changes)
        batch, _ = learner._make_batch(bandit(learner.policy, 2, seeded(1)))
    else:
        learner = grpo_learner(**changes)
        batch, _ = learner._make_batch(play(learner.policy, [(1, 1, (1, 0)), (1, 1, (0, 0))]))
    two = torch.ones(2, dtype=torch.float64)
    return learner, replace(batch, weight=two, advantage=2 * two)


def proximal(learner, batch, recorded, present, age):
    """``batch`` as the objective uses it, for decisions with log-probs ``recorded``, which are now ``present``."""
    two, metrics = torch.ones(2, dtype=torch.float64), {}
    batch = replace(batch, logprob=two * torch.tensor(recorded), age=torch.tensor(age))
    return learner._with_proximal(batch, Likelihood(two * torch.tensor(present), two, {}), metrics), metrics


BOTH = pytest.mark.parametrize("kind", ["ppo", "grpo"])


@BOTH
def test_the_decoupled_objective_by_hand(kind):
    """log pi is -1 when the decision is made, -.8 at the start of the update and -.5 now; A = 2, clip .2."""
    learner, batch = batch_of(kind, clip_low=0.2, clip_high=0.2)
    batch, metrics = proximal(learner, batch, [-1.0, -0.8], [-0.8, -0.8], [1, 0])
    assert batch.weight.tolist() == pytest.approx([1.221403, 1])
    assert metrics["policy/logprob_gap"] == 0 and metrics["policy/importance_weight"] == pytest.approx(1.221403)
    assert metrics["rollout/stale"] == metrics["rollout/age"] == 0.5
    new = Likelihood(torch.tensor([-0.5, -0.5]).double(), torch.zeros(2), {})
    assert (new.logprob - batch.logprob).exp().tolist() == pytest.approx([1.349859] * 2)
    assert learner.policy_loss(batch, new)[0].item() == pytest.approx(-(2.931367 + 2.4) / 2)


def test_dppo_weights_its_steps_too():
    config = DPPOConfig(critic_warmup=0, minibatch=64, epochs=1)
    dppo = DPPO(
        policy := FlowToy(sampler=SDE, width=16), policy.trainable(), ValueCritic({"state": 1}), config, seeded()
    )
    batch, _ = dppo._make_batch(bandit(policy, 4, seeded(1)))
    new = policy.log_prob(batch.features, batch.sample, batch.aux)
    steps = replace(batch, logprob=policy.step_logprob(batch.aux, new.params).detach())
    once, _ = dppo.policy_loss(steps, new)
    thrice, _ = dppo.policy_loss(replace(steps, weight=3 * steps.weight), new)
    assert thrice.item() == pytest.approx(3 * once.item())


@BOTH
def test_the_importance_weight_is_bounded(kind):
    learner, batch = batch_of(kind, max_importance_weight=1.5)
    batch, _ = proximal(learner, batch, [-5.0, 0.0], [0.0, 0.0], [2, 0])
    assert batch.weight.tolist() == [1.5, 1]


@BOTH
def test_stale_log_probs_are_no_numerical_gap(kind):
    learner, batch = batch_of(kind)
    found, metrics = proximal(learner, batch, [-1.0, 0.0], [0.0, 0.005], [1, 0])
    assert metrics["policy/logprob_gap"] == pytest.approx(0.005) and metrics["policy/logprob_recomputed"] == 0
    assert found.logprob.tolist() == [0.0, 0.0]


def rounding(experience, std: float):
    noise = std * torch.randn(experience.logprob.shape, generator=seeded(7))
    return replace(experience, logprob=experience.logprob + noise)


def test_rounding_of_the_same_version_is_corrected_and_said_once():
    ppo, steps = ppo_learner(), []
    loss = ppo.policy_loss
    ppo.policy_loss = lambda row, new: steps.append((new.logprob - row.logprob).detach().abs().max()) or loss(row, new)
    with pytest.warns(UserWarning, match=r"recorded log-probs differ by up to .* are recomputed"):
        metrics = ppo.update(rounding(bandit(ppo.policy, 64, seeded(1)), 0.03))
    assert metrics["policy/logprob_recomputed"] == 1 and 0.05 < metrics["policy/logprob_gap"] < 0.15
    assert steps[0] <= 1e-4, "the first ratio is 1"
    ppo.policy.version += 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ppo.update(rounding(bandit(ppo.policy, 64, seeded(2)), 0.03))["policy/logprob_recomputed"] == 1
        ppo.policy.version += 1
        assert ppo.update(bandit(ppo.policy, 64, seeded(3)))["policy/logprob_recomputed"] == 0


@pytest.mark.parametrize(
    "change", [lambda p: p + 0.3, lambda p: p - 0.2, lambda p: 0.5 * p], ids=["+.3", "-.2", "half"]
)
def test_a_log_prob_that_is_not_the_density_is_refused(change):
    ppo = ppo_learner()
    experience = bandit(ppo.policy, 64, seeded(1))
    before = weights(ppo.policy)
    with pytest.raises(ContractError, match=r"rounding cannot explain.*density that act samples from") as caught:
        ppo.update(replace(experience, logprob=change(experience.logprob)))
    assert same(before, weights(ppo.policy)) and str(caught.value).count(". ") == 0


@pytest.mark.parametrize("terms", [8, 80, 6400])
def test_rounding_to_bfloat16_passes_whatever_the_size_of_the_action(terms):
    each = torch.full((500,), float(terms))
    for case in range(20):
        gap = 0.011 * terms**0.5 * torch.randn(500, generator=seeded(case))
        check_density(gap, each, OneProcess())
    check_density(torch.full((1,), 0.02), each[:1], OneProcess())
    with pytest.raises(ContractError, match="in 1 of 500 decisions"):
        check_density(torch.cat([gap[:499], torch.tensor([1.1 * 8 * 0.011 * terms**0.5])]), each, OneProcess())


def test_a_term_with_little_noise_rounds_like_several():
    """What rounds a mean is divided by the std: a term of std .1 is like four of std .2, with a mean of 3 like 36."""
    params = {"mean": torch.tensor([[[0.0, 1.0, -3.0], [0.0, 1.0, -3.0]]]), "std": torch.tensor([[[0.1], [0.6]]])}
    assert rounding_terms(Likelihood(torch.zeros(1), torch.zeros(1), params), torch.zeros(1, 3)).tolist() == [
        pytest.approx(4 + 4 + 36 + 3)
    ]
    assert rounding_terms(Likelihood(torch.zeros(1), torch.zeros(1), {}), torch.zeros(1, 4, 2)).tolist() == [8]


@pytest.mark.parametrize("sampler", [SDE, FlowSampler(FlowNoise(0.08, 0.3), AllSteps(), 4)], ids=["sde", "noise"])
def test_acting_in_bfloat16_is_within_the_stated_bound(sampler):
    """Eight Gaussian terms: the log-ratio of every decision is below 8 * .011 * sqrt(8) and is corrected."""
    ppo = ppo_learner(FlowToy(sampler=sampler, width=16))
    with torch.autocast("cpu", torch.bfloat16):
        experience = bandit(ppo.policy, 256, seeded(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = ppo.update(experience)
    assert 1e-3 < metrics["policy/logprob_gap"] < 8 * 0.011 * 8**0.5
    assert metrics["policy/logprob_recomputed"] == float(metrics["policy/logprob_gap"] > 1e-2)


def test_all_processes_correct_or_refuse_together():
    """The second process's log-probs alone are off, by rounding and then by more."""
    policy = ppo_learner().policy
    experience = bandit(policy, 64, seeded(1))
    for shift, message in ((rounding, None), (lambda e, std: replace(e, logprob=e.logprob + 0.3), "rounding cannot")):
        both = [ppo_learner(copy.deepcopy(policy), reducer=reducer, epochs=1) for reducer in TwoProcesses.pair()]
        parts = [experience, shift(experience, 0.03)]
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(ppo.update, part) for ppo, part in zip(both, parts, strict=True)]
            if message:
                for job in jobs:
                    with pytest.raises(ContractError, match=message):
                        job.result(20)
            else:
                with pytest.warns(UserWarning, match="recomputed"):
                    assert [job.result(20)["policy/logprob_recomputed"] for job in jobs] == [1, 1]


# -- age --------------------------------------------------------------------------------------------------------------


@BOTH
def test_the_age_counts_from_the_learners_version(kind):
    """Not from the newest decision of the rollout, which may be as old as all others."""
    learner = ppo_learner() if kind == "ppo" else grpo_learner()
    experience = bandit(learner.policy, 64, seeded(1)) if kind == "ppo" else play(learner.policy)
    learner.policy.version = 3
    batch, _ = learner._make_batch(experience)
    assert (batch.age == 3).all()
    metrics = learner.update(experience)
    assert metrics["rollout/stale"] == 1 and metrics["rollout/age"] == 3 and metrics["policy/logprob_gap"] == 0


@BOTH
def test_decisions_beyond_the_age_bound_are_dropped_and_counted(kind):
    learner = ppo_learner(max_age=2) if kind == "ppo" else grpo_learner(max_age=2)
    experience = bandit(learner.policy, 64, seeded(1)) if kind == "ppo" else play(learner.policy)
    count = int(experience.valid.any(-1).sum())
    for version, dropped in ((2, 0), (3, count)):
        learner.policy.version = version
        batch, metrics = learner._make_batch(experience)
        assert metrics["rollout/dropped_stale"] == dropped
        assert (len(batch.logprob) == 0) == bool(dropped)
    before = weights(learner.policy)
    assert learner.update(experience)["rollout/decisions"] == 0 and same(before, weights(learner.policy))


def test_dropped_decisions_leave_grpos_denominators():
    grpo = grpo_learner(max_age=0)
    experience = play(grpo.policy)
    grpo.policy.version = 1
    experience.version[:, :5] = 1  # the last group, of equal returns, is too old
    batch, _ = grpo._make_batch(experience)
    alone, _ = grpo._make_batch(replace(experience, version=experience.version * 0 + 1))
    assert batch.weight[0] / alone.weight[0] == pytest.approx(19 / 14)


@BOTH
def test_a_decision_from_the_future_is_refused(kind):
    learner = ppo_learner() if kind == "ppo" else grpo_learner()
    experience = bandit(learner.policy, 64, seeded(1)) if kind == "ppo" else play(learner.policy)
    with pytest.raises(ContractError, match=r"policy version 2 but the learner has version 0.*same state"):
        learner.update(replace(experience, version=experience.version + 2))
    idle = experience.version + torch.where(experience.valid.any(-1), 0, 9)
    assert learner.update(replace(experience, version=idle))["rollout/decisions"] > 0
