"""PPO: ratio, objective and value targets by hand, which decisions enter the loss, and errors."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from sims.catalog import make
from tests.algorithms.ppo_learners import CONFIG, Watching, learner
from tests.toys import FlowToy, TwoProcesses, bandit, columns, rollout, same, seeded, weights
from vla_rl.algorithms.policy_gradient import LR_FACTOR
from vla_rl.algorithms.ppo import PPO, PPOConfig, RecomputingPPO, _Batch
from vla_rl.contract.errors import NonFiniteError, UserError
from vla_rl.contract.policy import Likelihood
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.feed_forward import GaussianPolicy

# -- the ratio --------------------------------------------------------------------------------------------------------


def test_the_ratio_is_one_before_the_first_update_and_not_after():
    """With every sampler: ``tests/policies/test_likelihoods.py``."""
    ppo = learner(kind=Watching, minibatch=7)
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
    ppo, state = learner(critic_warmup=10**6, gamma=0.5, critic_lr=2e-2, epochs=1), torch.zeros(8, 1)
    out, _ = ppo.policy.act({"state": state}, {}, "sample", seeded())
    yes, final = torch.ones(1, 8, dtype=torch.bool), torch.stack([torch.zeros(8), torch.arange(8)], 1).long()
    ends = {"truncated": yes, "terminated": ~yes, "final_index": final, "final_features": {"state": state}}
    features = {"state": torch.stack([state, state + 5])}  # the next episode has another initial state
    experience = rollout(features, out, torch.ones(1, 8, 3), **(ends if truncated else {}))
    for _ in range(150):
        ppo.update(experience)
    assert ppo.critic({"state": state})[0].item() == pytest.approx(expected, abs=0.02)


class Credited:
    """Keeps what its policy loss is given, with the critic of that moment."""

    def policy_loss(self, row, new):
        self.kept = [*getattr(self, "kept", []), (row, copy.deepcopy(self.critic))]
        return super().policy_loss(row, new)


@pytest.mark.parametrize(("kind", "anew"), [(RecomputingPPO, True), (PPO, False)], ids=["recomputing", "ppo"])
def test_every_epoch_has_its_critics_advantages_and_returns_if_asked(kind, anew):
    """Three actions that earn 1 each, gamma 1/2, then cut: 1 + 1/2 + 1/4 + V/8; one step an epoch."""
    ppo = learner(kind=type("Kept", (Credited, kind), {}), gamma=0.5, critic_lr=1e-2)
    nn.init.normal_(ppo.critic.head.weight, generator=seeded(3))  # it begins as 0, which tells nothing apart
    state, yes = torch.randn(64, 1, generator=seeded(2)), torch.ones(1, 64, dtype=torch.bool)
    out, _ = ppo.policy.act({"state": state}, {}, "sample", seeded())
    final = torch.stack([torch.zeros(64), torch.arange(64)], 1).long()
    ends = {"truncated": yes, "terminated": ~yes, "final_index": final, "final_features": {"state": state}}
    ppo.update(rollout({"state": torch.stack([state, state])}, out, torch.ones(1, 64, 3), **ends))
    assert len(ppo.kept) == CONFIG.epochs
    for row, critic in ppo.kept:
        value = (critic if anew else ppo.kept[0][1])(row.features).detach()
        torch.testing.assert_close(row.returns, 1.75 + value / 8)
        torch.testing.assert_close(row.advantage, standardised(1.75 - value * 7 / 8), rtol=1e-3, atol=1e-3)
    values = [critic({"state": state}).sum().item() for _, critic in ppo.kept]
    assert len(set(values)) == CONFIG.epochs, "the critic has learnt in between"


def standardised(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std(correction=0)


def test_the_critic_is_calibrated_once_before_its_first_value():
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


def test_one_intervened_action_is_enough_to_leave_a_decision_out():
    ppo = learner()
    out, _ = ppo.policy.act({"state": torch.zeros(8, 1)}, {}, "sample", seeded(1))
    experience = rollout({"state": torch.zeros(2, 8, 1)}, out, torch.zeros(1, 8, 3))
    experience.intervened[0, 2, 1] = True
    assert ppo.update(experience)["rollout/decisions"] == 7


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


def test_a_policy_without_a_likelihood_is_refused():
    class NoKl:
        version = 0
        encode = initial_state = reset_state = act = log_prob = lambda self: None

    for policy in (NoKl(), object()):
        with pytest.raises(
            UserError, match=r"needs a policy with .*kl but .* so no ratio can be formed; .* or add them"
        ) as caught:
            PPO(policy, {}, nn.Linear(1, 1), CONFIG, seeded())
        assert type(policy).__name__ in str(caught.value) and str(caught.value).count(". ") == 0


class Known(nn.Module):
    """A critic whose value is the first entry of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, features):
        return features["state"][..., 0]


def known_learner(**changes):
    policy = FlowToy(width=16)
    return PPO(policy, policy.trainable(), Known(), PPOConfig(**changes), torch.Generator())


def test_an_advantage_is_over_the_value_of_its_own_state():
    ppo = known_learner(gamma=0.5)
    state = torch.tensor([[[5.0], [1.0]], [[2.0], [8.0]]])  # A = 2/2 - 5, 8/2 - 1
    out, _ = ppo.policy.act({"state": state[0]}, {}, "sample", torch.Generator())
    no = torch.zeros(1, 2, dtype=torch.bool)
    batch, _ = ppo._make_batch(rollout({"state": state}, out, torch.zeros(1, 2, 1), terminated=no, truncated=no))
    assert batch.advantage.tolist() == pytest.approx([-1, 1]) and batch.returns.tolist() == pytest.approx([1, 4])


def test_a_rescue_is_cut_out_of_the_return():
    """A person acts in the second decision, which earns 1: the first one bootstraps from V at the takeover."""
    ppo = known_learner(gamma=0.5, lam=0.5)
    value = torch.tensor([1.0, 6.0, 2.0, 8.0])
    state = value[:, None, None]
    outs = [ppo.policy.act({"state": state[t]}, {}, "sample", torch.Generator())[0] for t in range(3)]
    earned = zip(outs, (0.0, 1.0, 4.0), strict=True)
    parts = [rollout({"state": state[:2]}, out, torch.tensor([[[reward]]])) for out, reward in earned]
    one, shared = parts[0], ("sample", "executed", "logprob", "reward", "valid", "intervened", "version", "seeds")
    no = torch.zeros(3, 1, dtype=torch.bool)
    experience = replace(
        one,
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in shared},
        aux={name: torch.cat([part.aux[name] for part in parts]) for name in one.aux},
        features={"state": state},
        terminated=no,
        truncated=no,
        success=no,
    )
    experience.intervened[1] = True
    batch, metrics = ppo._make_batch(experience)
    assert metrics["rollout/decisions"] == 2
    assert batch.returns.tolist() == [0.5 * 6, 4 + 0.5 * 8], "neither the reward nor the advantage of the rescue"


def test_minibatches_are_drawn_anew_in_every_epoch():
    ppo = learner(kind=Watching, minibatch=24, stop_kl=1e9)
    for i in range(2):
        ppo.update(bandit(ppo.policy, 100, seeded(i)))
    orders = [torch.cat(parts).tolist() for parts in ppo.drawn]
    assert len(orders) == 2 * CONFIG.epochs and all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all([len(part) for part in parts] == [25] * 4 for parts in ppo.drawn)
    assert ppo.steps == ["critic+policy"] * 2 * 4 * CONFIG.epochs


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_close(ppo: PPO, whole: PPO, rtol: float = 1e-9) -> None:
    """Their weights, of policy and critic."""
    for mine, one in ((ppo.policy, whole.policy), (ppo.critic, whole.critic)):
        torch.testing.assert_close(weights(mine), weights(one), rtol=rtol, atol=1e-9)


@pytest.mark.parametrize("cut", [30, 100])
def test_two_processes_that_share_the_data_end_as_one(cut, in_double):
    """Minibatches, KL stop, learning rate and the critic's statistics included; ``cut`` 100: one has nothing.

    In double precision: where a gradient is nearly zero, Adam makes a step of the order of summation.
    """
    config = {"minibatch": 24, "lr": 1e-2, "critic_warmup": 0, "target_kl": 0.02, "stop_kl": 2.0}
    policy = learner().policy
    whole = learner(copy.deepcopy(policy), **config)
    experience = bandit(policy, 100, seeded(1))
    experience = replace(experience, intervened=(torch.arange(100) % 7 == 0)[None, :, None])
    expected = twice(whole, experience)
    assert expected[0]["policy/stopped"] + expected[1]["policy/stopped"] > 0 and expected[0]["rollout/decisions"] == 85

    both = [learner(copy.deepcopy(policy), reducer=reducer, **config) for reducer in TwoProcesses.pair()]
    parts = [columns(experience, slice(0, cut)), columns(experience, slice(cut, None))]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(twice, both, parts))
    for ppo, metrics in zip(both, found, strict=True):
        assert_close(ppo, whole)
        for name in (
            "rollout/decisions",
            "policy/kl",
            "policy/clip_fraction",
            "policy/loss",
            "critic/loss",
            "policy/stopped",
            "policy/lr",
        ):
            assert metrics[-1][name] == pytest.approx(expected[-1][name], rel=1e-6, abs=1e-9), name


def twice(ppo: PPO, experience) -> list[dict[str, float]]:
    """Two updates from the same rollout, which is one update old in the second."""
    metrics = []
    for _ in range(2):
        metrics.append(ppo.update(experience))
        ppo.policy.version += 1
    return metrics


@pytest.mark.parametrize("micro_batch", [1, 8, 0])
def test_micro_batches_leave_the_gradient_as_it_is(micro_batch, in_double):
    """Of policy, critic and entropy bonus, up to the KL stop; no forward pass exceeds ``micro_batch`` decisions.

    0: a device has memory for 55 rows of a network, and a number of decisions that fits is found.
    """
    config = {"minibatch": 24, "lr": 1e-2, "target_kl": 0.02, "stop_kl": 2.0, "epochs": 2}
    memory = math.inf if micro_batch else 55
    policy, sizes = learner().policy, []
    whole = learner(copy.deepcopy(policy), **config)
    parts = learner(copy.deepcopy(policy), **config, micro_batch=micro_batch)

    def compute(_, given):
        if _batch_size(given[0]) > memory:
            raise torch.OutOfMemoryError
        sizes.append(_batch_size(given[0]))

    for module in (parts.policy.net, parts.critic):
        module.register_forward_pre_hook(compute)
    experience = bandit(policy, 50, seeded(1))
    experience = replace(experience, intervened=(torch.arange(50) % 7 == 0)[None, :, None])
    expected, found = whole.update(experience), parts.update(experience)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    assert_close(parts, whole, 1e-8)
    # the bandit's features have two time steps of 50, of which the critic takes at least one
    assert max(sizes) <= max(4 * parts.micro_batch, 50) and (micro_batch != 1 or sizes.count(4) > 50)
    assert parts.micro_batch == (micro_batch or 13) and learner(micro_batch=24).micro_batch == 24
    if not micro_batch:
        named = learner(parts.policy, **config, micro_batch=24)
        with pytest.raises(torch.OutOfMemoryError):  # which a person has chosen
            named.update(experience)


class InStep(TwoProcesses):
    """Each holds a share of the weights, so that both run the policy equally often."""

    def passes(self, own: int) -> int:
        most = torch.zeros(2, dtype=torch.float64)
        most[self.rank] = own
        return int(self.sum(most).max())


@pytest.mark.parametrize("cut", [11, pytest.param(50, marks=pytest.mark.full)])
def test_processes_that_share_weights_run_as_often(cut, in_double):
    """With 11 and 39 decisions, or 50 and none, in micro-batches of 4; the result is that of one process."""
    config = {"minibatch": 24, "lr": 1e-2, "critic_warmup": 0, "target_kl": 0.02, "stop_kl": 2.0, "micro_batch": 4}
    policy = learner().policy
    whole = learner(copy.deepcopy(policy), **config)
    experience = bandit(policy, 50, seeded(1))
    twice(whole, experience)
    both = [learner(copy.deepcopy(policy), reducer=reducer, **config) for reducer in InStep.pair()]
    passes = [[], []]
    for ppo, count in zip(both, passes, strict=True):
        log_prob = ppo.policy.log_prob

        def counted(features, sample, aux, log_prob=log_prob, count=count):
            count.append(torch.is_grad_enabled())
            return log_prob(features, sample, aux)

        ppo.policy.log_prob = counted
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(twice, both, [columns(experience, slice(0, cut)), columns(experience, slice(cut, None))]))
    assert passes[0] == passes[1] and len(passes[0]) > 30
    for ppo in both:
        assert_close(ppo, whole)


def _batch_size(given) -> int:
    item = given if isinstance(given, torch.Tensor) else given["state"]
    return item.numel() // item.shape[-1]


# -- the trust region -------------------------------------------------------------------------------------------------


def test_epochs_end_early_when_the_kl_is_too_large():
    ppo = learner(kind=Watching, target_kl=1e-4, lr=1e-2)
    metrics = ppo.update(bandit(ppo.policy, 640, seeded(1)))
    count = ppo.steps.count("critic+policy")
    assert metrics["policy/stopped"] == 1 and 1 < count < 20
    assert ppo.steps == ["critic+policy"] * count + ["critic"] * (40 - count), "the critic goes on after the stop"
    assert ppo.lr == pytest.approx(1e-2 / LR_FACTOR)


def test_the_kl_is_that_of_the_old_policy_to_the_new_one():
    ppo, given = learner(), []
    kl = ppo.policy.kl
    ppo.policy.kl = lambda old, new: (
        given.append((old["mean"].requires_grad, new["mean"].requires_grad)) or kl(old, new)
    )
    ppo.update(bandit(ppo.policy, 64, seeded(1)))
    assert set(given) == {(False, True)}


@pytest.mark.parametrize(
    ("kl", "stopped", "start", "expected"),
    [
        (0.1, False, 1e-3, 1e-3),
        (0.149, False, 1e-3, 1e-3),
        (0.151, False, 1e-3, 1e-3 / LR_FACTOR),
        (0.068, False, 1e-3, 1e-3),
        (0.066, False, 1e-3, 1e-3 * LR_FACTOR),
        (0.1, True, 1e-3, 1e-3 / LR_FACTOR),
        (0.0, True, 1e-3, 1e-3 / LR_FACTOR),
        (0.9, False, 1.2e-5, 1e-5),
        (0.0, False, 9e-3, 1e-2),
    ],
)
def test_the_learning_rate_follows_the_kl_within_its_bounds(kl, stopped, start, expected):
    ppo = learner(target_kl=0.1, lr=start)
    ppo._adapt_lr(kl, stopped)
    assert ppo.lr == pytest.approx(expected)
