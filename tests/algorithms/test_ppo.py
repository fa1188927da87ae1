"""PPO: ratio, objective and value targets by hand, which decisions enter the loss, and errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from sims.catalog import make
from tests.algorithms.ppo_learners import CONFIG, Watching, learner, same, seeded, weights
from tests.toys import FlowToy, bandit, rollout
from vla_rl.algorithms.ppo import PPO, _Batch
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import Likelihood
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import GaussianPolicy
from vla_rl.policies.flow import AllSteps, FlowSampler, LastStep, LastStepFromNoise, OneRandomStep
from vla_rl.policies.flow_schedules import FlowCps, FlowDdim, FlowNoise, FlowOu, FlowSde

SCHEDULES = [FlowSde(0.5), FlowOu(0.5, 0.05), FlowDdim(0.5, 0.05), FlowCps(0.5, 0.05), FlowNoise(0.08, 0.3)]
NOISE_PLACEMENTS = [AllSteps(), OneRandomStep(), LastStep(), LastStepFromNoise()]
EVERY = [FlowSampler(schedule, noisy_steps, 4) for schedule in SCHEDULES for noisy_steps in NOISE_PLACEMENTS]
name = lambda sampler: f"{type(sampler.schedule).__name__}-{type(sampler.placement).__name__}"  # noqa: E731


# -- the ratio --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", EVERY, ids=name)
def test_the_ratio_is_one_before_the_first_update_and_not_after(sampler):
    ppo = learner(FlowToy(sampler=sampler, width=16), Watching, minibatch=7)
    metrics = ppo.update(bandit(ppo.policy, 49, seeded(1)))
    limit = 1e-5 * math.sqrt(8)
    assert ppo.gaps[0] <= limit and metrics["policy/logprob_gap"] <= limit
    assert max(ppo.gaps[1:]) > 1e-3


def test_the_clipped_objective_by_hand():
    ppo = learner(clip_low=0.2, clip_high=0.3)
    ratio, advantage = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1]), torch.tensor([3.0, 1.0, -1.0, -1.0, 2.0])
    old = torch.tensor([0.3, -2.0, 0.0, 5.0, 1.0])
    one = torch.ones_like(old)
    row = _Batch({}, old, {}, old, advantage, one, one, torch.ones(5, 1).bool(), advantage)
    loss, clipped = ppo.policy_loss(row, Likelihood(old + ratio.log(), old, {}))
    # 3 min(1.5, 1.3), min(.5, .8), min(-1.5, -1.3), min(-.5, -.8), 2 * 1.1
    assert loss.item() == pytest.approx(-(3.9 + 0.5 - 1.5 - 0.8 + 2.2) / 5)
    assert clipped.tolist() == [1, 1, 1, 1, 0]


def test_the_first_gradient_is_the_policy_gradient():
    """At ratio 1 the objective's gradient is E[A grad log pi], towards better actions."""
    ppo = learner()
    batch, _ = ppo._make_batch(bandit(ppo.policy, 64, seeded(1)))
    new = ppo.policy.log_prob(batch.features, batch.sample, batch.aux)
    found = torch.autograd.grad(ppo.policy_loss(batch, new)[0], ppo.parameters.values(), retain_graph=True)
    expected = torch.autograd.grad(-(batch.advantage * new.logprob).mean(), ppo.parameters.values())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("truncated", "expected"), [(False, 1.75), (True, 1.75 / (1 - 0.125))])
def test_the_critic_learns_the_discounted_return_of_chunks(truncated, expected):
    """Three actions that earn 1 each, gamma 1/2, one state: 1 + 1/2 + 1/4, then again if the episode was truncated."""
    ppo, state = learner(critic_warmup=10**6, gamma=0.5, critic_lr=1e-2), torch.zeros(8, 1)
    out, _ = ppo.policy.act({"state": state}, {}, "sample", seeded())
    yes, final = torch.ones(1, 8, dtype=torch.bool), torch.stack([torch.zeros(8), torch.arange(8)], 1).long()
    ends = {"truncated": yes, "terminated": ~yes, "final_index": final, "final_features": {"state": state}}
    features = {"state": torch.stack([state, state + 5])}  # the next episode has another initial state
    experience = rollout(features, out, torch.ones(1, 8, 3), **(ends if truncated else {}))
    for _ in range(150):
        ppo.update(experience)
    assert ppo.critic({"state": state})[0].item() == pytest.approx(expected, abs=0.02)


def test_the_critic_is_calibrated_once_and_before_the_first_value():
    ppo = learner()
    experience = bandit(ppo.policy, 64, seeded(1))
    # log-probs of other features are no recorded ones
    ppo.config = replace(ppo.config, max_logprob_gap=math.inf)
    ppo.update(replace(experience, features={"state": 100 + 7 * experience.features["state"]}))
    mean = ppo.critic.inputs.mean.clone()
    assert 95 < mean.item() < 105 and 3 < ppo.critic.inputs.std.item() < 5
    ppo.update(experience)
    assert torch.equal(ppo.critic.inputs.mean, mean)


def test_first_iterations_train_the_critic_only():
    ppo = learner(critic_warmup=2)
    policy, lr = weights(ppo.policy), ppo.lr
    for i in range(3):
        critic = weights(ppo.critic)
        ppo.update(bandit(ppo.policy, 64, seeded(i)))
        assert not same(weights(ppo.critic), critic)
        assert same(weights(ppo.policy), policy) == (i < 2)
        assert i == 2 or ppo.lr == lr


# -- which decisions enter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["intervened", "idle"])
def test_intervened_and_idle_decisions_never_enter_a_likelihood(kind):
    """Whatever stands in their samples, the result is the same to the last bit."""
    ends = []
    for poison in (float("nan"), 7.0):
        ppo = learner()
        experience = bandit(ppo.policy, 64, seeded(1))
        left_out = torch.zeros(1, 64, 1, dtype=torch.bool)
        left_out[0, ::3] = True
        flags = {"intervened": left_out} if kind == "intervened" else {"valid": ~left_out}
        poisoned = {key: item.clone() for key, item in experience.aux.items()}
        sample, logprob = experience.sample.clone(), experience.logprob.clone()
        for item in (sample, logprob, poisoned["points"]):
            item[left_out[..., 0]] = poison
        metrics = ppo.update(replace(experience, sample=sample, logprob=logprob, aux=poisoned, **flags))
        assert metrics["rollout/decisions"] == 42 and metrics["policy/logprob_gap"] < 1e-4
        ends.append(weights(ppo.policy) + weights(ppo.critic))
    assert same(*ends) and all(item.isfinite().all() for item in ends[0])


def test_one_intervened_action_is_enough_to_leave_a_decision_out():
    ppo = learner()
    experience = bandit(ppo.policy, 8, seeded(1))
    touched = torch.zeros(1, 8, 3, dtype=torch.bool)
    touched[0, 2, 1] = True
    chunks = {"reward": torch.zeros(1, 8, 3), "valid": torch.ones(1, 8, 3, dtype=torch.bool), "intervened": touched}
    assert ppo.update(replace(experience, **chunks))["rollout/decisions"] == 7


def test_without_a_usable_decision_nothing_changes():
    ppo = learner()
    before = weights(ppo.policy) + weights(ppo.critic)
    experience = bandit(ppo.policy, 8, seeded(1))
    metrics = ppo.update(replace(experience, intervened=experience.valid))
    assert metrics == {"rollout/decisions": 0.0, "rollout/dropped_stale": 0.0}
    assert same(before, weights(ppo.policy) + weights(ppo.critic))


def test_the_value_loss_is_half_the_squared_error():
    ppo = learner(epochs=1)
    experience = bandit(ppo.policy, 64, seeded(1))
    batch, _ = ppo._make_batch(experience)
    error = (ppo.critic(batch.features) - batch.returns).square().mean()
    assert ppo.update(experience)["critic/loss"] == pytest.approx(0.5 * error.item())


def test_the_entropy_bonus_widens_the_noise():
    """Rewards that are all equal leave only the bonus, and none without it."""
    for bonus in (0.0, 0.1):
        torch.manual_seed(0)
        env = make("point_mass", num_envs=2)
        policy = GaussianPolicy(env.spec)
        ppo = PPO(policy, policy.trainable(), ValueCritic({"state": 2}), replace(CONFIG, entropy=bonus), seeded())
        kept = {"state": torch.rand(16, 2, generator=seeded())}
        out, _ = policy.act(kept, {}, "sample", seeded(1))
        before = policy.log_std.detach().clone()
        ppo.update(rollout({"state": torch.stack([kept["state"]] * 2)}, out, torch.zeros(1, 16, 1)))
        assert torch.equal(policy.log_std, before) if bonus == 0 else (policy.log_std > before).all()


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "who", "tensor"),
    [("sample", "policy", r"'net\.0\.weight'"), ("reward", "critic", r"'body\.0\.weight'")],
)
def test_a_nan_stops_before_it_enters_the_weights_and_says_where(part, who, tensor):
    ppo = learner()
    ppo.update(bandit(ppo.policy, 64, seeded(1)))
    experience = bandit(ppo.policy, 64, seeded(2))
    if part == "sample":
        experience.aux["points"][0, 5, 2] = float("nan")
    else:
        experience.reward[0, 5] = float("nan")
    before = weights(ppo.policy)
    with pytest.raises(NonFiniteError, match=rf"the {who} gradient of {tensor} is not finite in iteration 1"):
        ppo.update(experience)
    assert same(before, weights(ppo.policy)) and all(item.isfinite().all() for item in weights(ppo.critic))


def test_a_policy_without_a_likelihood_is_refused_in_one_sentence():
    class NoKl:
        version = 0
        encode = initial_state = reset_state = act = log_prob = lambda self: None

    for policy in (NoKl(), object()):
        with pytest.raises(UserError, match=r"needs a policy with log_prob and kl .* choose an algorithm") as caught:
            PPO(policy, {}, nn.Linear(1, 1), CONFIG, seeded())
        assert type(policy).__name__ in str(caught.value) and str(caught.value).count(". ") == 0
