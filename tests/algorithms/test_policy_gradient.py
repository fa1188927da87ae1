"""Stale decisions have the decoupled objective, in PPO as in GRPO; wrong log-probs are corrected or refused."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.algorithms.ppo_learners import CONFIG, SDE, Watching
from tests.algorithms.ppo_learners import learner as ppo_learner
from tests.algorithms.test_grpo import learner as grpo_learner
from tests.algorithms.test_grpo import play
from tests.token_toys import HORIZON, PARTS, SPEC, right, token_bandit, token_policy
from tests.toys import FlowToy, TwoProcesses, bandit, deployed, imitated, same, seeded, weights
from vla_rl.algorithms.decisions import Decisions
from vla_rl.algorithms.dppo import DPPO, DPPOConfig
from vla_rl.algorithms.group_relative import GRPO, GRPOConfig, RLOOConfig
from vla_rl.algorithms.policy_gradient import (
    check_density,
    clipped_objective,
    executed_parts,
    rounding_terms,
    surrogate,
)
from vla_rl.algorithms.ppo import PPO
from vla_rl.contract.batch import OneProcess
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.contract.policy import Likelihood
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import CategoricalConfig, CategoricalPolicy
from vla_rl.policies.normalization import RunningStatistics
from vla_rl.training.checkpoint import latest_state, save_state
from vla_rl.training.shapes_only import bytes_of


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


@pytest.mark.parametrize("change", [lambda p: p - 0.2, lambda p: 0.5 * p], ids=["-.2", "half"])
def test_a_log_prob_that_is_not_the_density_is_refused(change):
    ppo = ppo_learner()
    experience = bandit(ppo.policy, 64, seeded(1))
    before = weights(ppo.policy)
    with pytest.raises(ContractError, match=r"rounding cannot explain.*density that act samples from") as caught:
        ppo.update(replace(experience, logprob=change(experience.logprob)))
    assert same(before, weights(ppo.policy)) and str(caught.value).count(". ") == 0


@pytest.mark.parametrize("terms", [8, 80, 6400])
def test_rounding_to_bfloat16_passes_for_actions_of_any_size(terms):
    each = torch.full((500,), float(terms))
    for case in range(5):
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


def played(kind, **changes):
    """A learner of ``kind`` and experience of its policy."""
    if kind == "ppo":
        learner = ppo_learner(**changes)
        return learner, bandit(learner.policy, 64, seeded(1))
    learner = grpo_learner(**changes)
    return learner, play(learner.policy)


@BOTH
def test_the_age_counts_from_the_learners_version(kind):
    """Not from the newest decision of the rollout, which may be as old as all others."""
    learner, experience = played(kind)
    learner.policy.version = 3
    batch, _ = learner._make_batch(experience)
    assert (batch.age == 3).all()
    metrics = learner.update(experience)
    assert metrics["rollout/stale"] == 1 and metrics["rollout/age"] == 3 and metrics["policy/logprob_gap"] == 0


@BOTH
def test_decisions_beyond_the_age_bound_are_dropped_and_counted(kind):
    learner, experience = played(kind, max_age=2)
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
    learner, experience = played(kind)
    with pytest.raises(ContractError, match=r"policy version 2 but the learner has version 0.*same state"):
        learner.update(replace(experience, version=experience.version + 2))
    idle = experience.version + torch.where(experience.valid.any(-1), 0, 9)
    assert learner.update(replace(experience, version=idle))["rollout/decisions"] > 0


FAST = {"lr": 2e-2, "lr_bounds": (1e-5, 3e-2), "target_kl": 0.2}
GRPO_CONFIG = replace(GRPOConfig(), epochs=4, minibatch=64, **FAST)
EACH = pytest.mark.parametrize("logprob_per", PARTS)
FINE = pytest.mark.parametrize("logprob_per", ["action", "token"])


def ppo(logprob_per, kind=PPO, std=0.0, **changes) -> PPO:
    policy = token_policy(logprob_per, std)
    torch.manual_seed(1)
    critic = ValueCritic({"state": 1}, width=16)
    return kind(policy, policy.trainable(), critic, replace(CONFIG, **{**FAST, **changes}), seeded())


def grpo(logprob_per, config=GRPO_CONFIG, std=0.0) -> GRPO:
    policy = token_policy(logprob_per, std)
    return config.build(policy, policy.trainable(), torch.nn.Identity(), seeded(), OneProcess())


def decisions(old, advantage, valid) -> Decisions:
    """A minibatch with log-probs ``old``, weights of 1 and nothing else."""
    one = torch.ones(len(old))
    return Decisions({}, one, {}, old, torch.tensor(advantage), one, one, torch.tensor(valid))


def clipped(ratio, advantage):
    return clipped_objective(ratio, advantage, 0.2, 0.2)


# -- the objective ----------------------------------------------------------------------------------------------------


def test_golden_token_and_chunk_ratios():
    """Two tokens, A = 1: log pi goes from (-1, -1) to (-.9, -1.2); .961951 is the mean of the tokens' objectives."""
    new, old = torch.tensor([[-0.9, -1.2]]), torch.tensor([[-1.0, -1.0]])
    loss, _ = surrogate(decisions(old, [1.0], [[True]]), new, clipped)
    assert -loss.item() == pytest.approx(2 * 0.961951, abs=2e-6)
    loss, _ = surrogate(decisions(old.sum(1), [1.0], [[True]]), new.sum(1), clipped)
    assert -loss.item() == pytest.approx(0.904837, abs=1e-6)


def test_executed_parts_are_clipped_one_by_one():
    """Ratios 1.5 and 1.1 of the first action, 0.5 and NaN of the second, which the second decision did not execute."""
    ratio = torch.tensor([[1.5, 1.1, 0.5, 0.9], [1.5, 1.1, 0.5, math.nan]])
    new = ratio.log().requires_grad_()
    batch = decisions(torch.zeros(2, 4), [1.0, 3.0], [[True, True], [True, False]])
    loss, share = surrogate(batch, new, clipped)
    assert loss.item() == pytest.approx(-((1.2 + 1.1 + 0.5 + 0.9) + 3 * (1.2 + 1.1)) / 2)
    assert share.tolist() == [0.5, 0.5]
    loss.backward()
    expected = torch.tensor([[0.0, 1.1, 0.5, 0.9], [0.0, 3.3, 0.0, 0.0]]) / -2
    torch.testing.assert_close(new.grad, expected)


def test_which_parts_are_executed():
    valid = torch.tensor([[True, False]])
    assert executed_parts(valid, torch.zeros(1)).tolist() == [[True]]
    assert executed_parts(valid, torch.zeros(1, 2)).tolist() == [[True, False]]
    assert executed_parts(valid, torch.zeros(1, 6)).tolist() == [[True] * 3 + [False] * 3]
    with pytest.raises(ContractError, match="3 parts but a chunk 2 actions"):
        executed_parts(valid, torch.zeros(1, 3))


# -- the first gradient -----------------------------------------------------------------------------------------------


def first_gradient(learner, experience) -> list[torch.Tensor]:
    batch, _ = learner._make_batch(experience)
    new = learner.policy.log_prob(batch.features, batch.sample, batch.aux)
    return list(torch.autograd.grad(learner.policy_loss(batch, new)[0], learner.learnt.values()))


@pytest.mark.parametrize("made", [ppo, grpo, lambda *a, **k: grpo(*a, RLOOConfig(), **k)], ids=["ppo", "grpo", "rloo"])
def test_the_first_gradient_is_the_same_for_all_parts(made):
    found = []
    for logprob_per, parts in PARTS.items():
        learner = made(logprob_per, std=0.5)
        experience = token_bandit(learner.policy, 8, 4, seeded(1))
        assert experience.logprob.shape == (1, 32, *([parts] if parts > 1 else []))
        whole = replace(experience, valid=torch.ones_like(experience.valid))
        found.append(first_gradient(learner, whole))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    assert max(item.abs().max() for item in found[0]) > 1e-3


@FINE
def test_actions_that_were_not_executed_have_no_say(logprob_per):
    """Only the first action of every chunk is executed; what is recorded of the others may be anything."""
    learner = ppo(logprob_per, std=0.5)
    experience = token_bandit(learner.policy, 8, 4, seeded(1))
    valid = torch.zeros_like(experience.valid)
    valid[..., 0] = True
    poisoned = experience.logprob.clone()
    poisoned[..., PARTS[logprob_per] // HORIZON :] = math.nan
    experience = replace(experience, valid=valid, logprob=poisoned)
    batch, _ = learner._make_batch(experience)
    new = learner.policy.log_prob(batch.features, batch.sample, batch.aux)
    found = torch.autograd.grad(
        learner.policy_loss(batch, new)[0], [*learner.learnt.values()], retain_graph=True, allow_unused=True
    )
    first = token_policy("token", 0.5).log_prob(batch.features, batch.sample, batch.aux).logprob.unflatten(1, (3, 2))
    torch.testing.assert_close(first.sum((1, 2)), new.logprob.sum(1))
    bias = found[-1].unflatten(0, (HORIZON, -1))
    assert bias[0].abs().max() > 1e-3 and not bias[1:].any()
    executed = learner.policy.log_prob(batch.features, batch.sample, batch.aux).logprob.unflatten(1, (HORIZON, -1))
    expected = torch.autograd.grad(-(batch.advantage * executed[:, 0].sum(1)).mean(), [*learner.learnt.values()])
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


# -- the update -------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("minibatch", [7, 64])
def test_every_parts_ratio_is_one_before_the_first_update(logprob_per, minibatch):
    learner = ppo(logprob_per, Watching, 0.5, minibatch=minibatch, epochs=3)
    metrics = learner.update(token_bandit(learner.policy, 16, 4, seeded(1)))
    limit = 1e-5 * math.sqrt(PARTS["token"])
    assert learner.gaps[0] <= limit and metrics["policy/logprob_gap"] <= limit
    assert max(learner.gaps[1:]) > 1e-3 and 0 < metrics["policy/clip_fraction"] < 1


def test_stale_parts_are_weighted_one_by_one():
    """log pi of two parts is -1 when acting, then -.8 and 4 at the start of the update: e^.2, and e^5 bounded to 2."""
    learner = ppo("action")
    one, old = torch.ones(2), torch.full((2, 3), -1.0)
    batch = replace(decisions(old, [2.0, 2.0], [[True] * 3] * 2), age=torch.tensor([1, 0]))
    present = Likelihood(torch.tensor([[-0.8, 4.0, -1.0], [-1.0, -1.0, -1.0]]), one, {})
    found, metrics = learner._with_proximal(batch, present, {}), {}
    torch.testing.assert_close(found.weight, torch.tensor([[math.exp(0.2), 2.0, 1.0], [1.0, 1.0, 1.0]]))
    assert torch.equal(found.logprob, present.logprob)
    learner._with_proximal(batch, present, metrics)
    assert metrics["policy/logprob_gap"] == 0 and metrics["rollout/stale"] == 0.5


def test_wrong_parts_are_refused():
    learner = ppo("token", std=0.5)
    experience = token_bandit(learner.policy, 8, 4, seeded(1))
    before = weights(learner.policy)
    with pytest.raises(ContractError, match=r"act recorded log-probs \[32\] but log_prob gives \[32, 6\]"):
        learner.update(replace(experience, logprob=experience.logprob.sum(-1)))
    with pytest.raises(ContractError, match="rounding cannot explain"):
        learner.update(replace(experience, logprob=experience.logprob + 0.1))
    assert same(before, weights(learner.policy))
    with pytest.warns(UserWarning, match="are recomputed"):
        noise = 0.02 * torch.randn(experience.logprob.shape, generator=seeded(2))
        assert learner.update(replace(experience, logprob=experience.logprob + noise))["policy/logprob_recomputed"]


# -- experience -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprob_per", ["chunk", "action"])
def test_parts_pass_through_windows_and_groups(logprob_per):
    env = make("gym", num_envs=4, id="CartPole-v1", time_limit=12)
    torch.manual_seed(0)
    policy = CategoricalPolicy(env.spec, RunningStatistics(4), CategoricalConfig(2, 8, 1, logprob_per=logprob_per))
    shape = () if logprob_per == "chunk" else (2,)
    rollout = RolloutSource(env, policy, 8, SeedStream(0, 10**6), seeded()).next()
    learner = PPO(policy, policy.trainable(), ValueCritic({"state": 4}, width=8), CONFIG, seeded())
    assert rollout.logprob.shape == (8, 4, *shape) and learner.update(rollout)["policy/logprob_gap"] <= 1e-5
    source = GroupConfig(groups=2, size=2, ahead=0).build(env, policy, SeedStream(0, 10**6), seeded(1))
    rollout = source.next()
    idle = ~rollout.valid.any(-1)
    assert rollout.logprob.shape == (*idle.shape, *shape) and idle.any() and not rollout.logprob[idle].any()
    learner = GRPO(policy, policy.trainable(), None, GRPO_CONFIG, seeded())
    metrics = learner.update(rollout)
    assert metrics["policy/logprob_gap"] <= 1e-5 and metrics["rollout/decisions"] > 0
    assert np.isfinite(metrics["policy/loss"])


# -- the optimum ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "logprob_per"),
    [
        pytest.param(
            made, part, id=f"{made.__name__}-{part}", marks=[pytest.mark.full] * ((made, part) != (ppo, "token"))
        )
        for made, part in product((ppo, grpo), PARTS)
    ],
)
def test_ppo_and_grpo_reach_the_optimum(made, logprob_per):
    learner, generator = made(logprob_per), seeded(1)
    assert learner.policy.spec is SPEC and right(learner.policy) < 0.7
    for _ in range(15):
        learner.update(token_bandit(learner.policy, 64, 4, generator))
    assert right(learner.policy) > 0.97


# -- moments of a byte each --------------------------------------------------------------------------------------------


@pytest.fixture
def not_compiled(monkeypatch):
    """torchao is installed apart from everything else, see pyproject.toml."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / ".cache" / "low-memory"))
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def wide(**changes) -> PPO:
    return ppo_learner(FlowToy(sampler=SDE), moments="8bit", **changes)


@pytest.mark.full
def test_a_run_with_8bit_moments_is_saved_and_goes_on_bit_for_bit(not_compiled, tmp_path):
    whole, rollouts = wide(), []
    for seed in range(4):
        rollouts.append(bandit(whole.policy, 64, seeded(seed)))
        whole.update(rollouts[-1])
        if seed == 1:
            save_state(tmp_path, 1, whole.state_dict())
    resumed = wide()
    resumed.load_state_dict(latest_state(tmp_path)[1])
    for rollout in rollouts[2:]:
        resumed.update(rollout)
    assert same(weights(whole.policy), weights(resumed.policy)) and whole.lr == resumed.lr != CONFIG.lr
    hidden = whole.policy.net[2].weight  # 64 x 64
    for moment in ("exp_avg", "exp_avg_sq"):
        assert bytes_of([whole.optimizer.state[hidden][moment]]) == 64 * 64 + 16 * 4 + 256 * 4  # codes, scales, map


@pytest.mark.full
def test_the_bandit_is_learnt_with_8bit_moments(not_compiled):
    learner, generator = wide(minibatch=256, lr=6e-3), seeded(1)
    learner.policy.load_state_dict(imitated())
    for _ in range(30):
        learner.update(bandit(learner.policy, 512, generator))
    assert deployed(learner.policy) > -0.025


def test_8bit_moments_need_torchao_and_whole_weights(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    sys.modules.pop("vla_rl.algorithms.adam_8bit", None)
    with pytest.raises(UserError, match=r"^torchao.* cannot take a byte each; pip install 'vla-rl\[low-memory\]'"):
        wide()
    monkeypatch.setattr("vla_rl.algorithms.policy_gradient.is_shard", lambda item: True)
    with pytest.raises(UserError, match=r"8bit.* would not be resumed; leave one of them out"):
        wide()
