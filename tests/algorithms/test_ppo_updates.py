"""PPO's updates: minibatches, micro-batches, several processes, the KL stop and the adaptive learning rate."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.algorithms.ppo_learners import CONFIG, Watching, learner, same, seeded, weights
from tests.toys import TwoProcesses, bandit
from vla_rl.algorithms.ppo import PPO


def test_minibatches_are_drawn_anew_in_every_epoch_and_use_every_decision_once():
    ppo = learner(kind=Watching, minibatch=24, stop_kl=1e9)
    for i in range(2):
        ppo.update(bandit(ppo.policy, 100, seeded(i)))
    orders = [torch.cat(parts).tolist() for parts in ppo.drawn]
    assert len(orders) == 2 * CONFIG.epochs and all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all([len(part) for part in parts] == [25] * 4 for parts in ppo.drawn)
    assert ppo.steps.count("policy") == ppo.steps.count("critic") == 2 * 4 * CONFIG.epochs


def test_the_same_seeds_give_the_same_weights():
    ends = []
    for _ in range(2):
        ppo = learner()
        for i in range(3):
            ppo.update(bandit(ppo.policy, 50, seeded(i)))
        ends.append(weights(ppo.policy) + weights(ppo.critic))
    assert same(*ends)


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cut", [30, 100])
def test_two_processes_that_share_the_data_end_with_the_weights_of_one(cut, in_double):
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
    parts = [_columns(experience, slice(0, cut)), _columns(experience, slice(cut, None))]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(twice, both, parts))
    for ppo, metrics in zip(both, found, strict=True):
        for name in ("policy", "critic"):
            for mine, one in zip(weights(getattr(ppo, name)), weights(getattr(whole, name)), strict=True):
                torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-9)
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


def _columns(experience, part):
    names = (
        "version",
        "sample",
        "logprob",
        "reward",
        "valid",
        "intervened",
        "terminated",
        "truncated",
        "success",
        "seeds",
    )
    cut = {key: getattr(experience, key)[:, part] for key in names}
    features = {key: item[:, part] for key, item in experience.features.items()}
    return replace(experience, features=features, aux={k: v[:, part] for k, v in experience.aux.items()}, **cut)


@pytest.mark.parametrize("micro_batch", [1, 8, 1000])
def test_micro_batches_leave_the_gradient_as_it_is(micro_batch, in_double):
    """Of policy, critic and entropy bonus, up to the KL stop; no forward pass exceeds ``micro_batch`` decisions."""
    config = {"minibatch": 24, "lr": 1e-2, "target_kl": 0.02, "stop_kl": 2.0, "epochs": 2}
    policy, sizes = learner().policy, []
    whole = learner(copy.deepcopy(policy), **config)
    parts = learner(copy.deepcopy(policy), **config, micro_batch=micro_batch)
    for module in (parts.policy.net, parts.critic):
        module.register_forward_pre_hook(lambda _, given: sizes.append(_batch_size(given[0])))
    experience = bandit(policy, 50, seeded(1))
    experience = replace(experience, intervened=(torch.arange(50) % 7 == 0)[None, :, None])
    expected, found = whole.update(experience), parts.update(experience)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    for name in ("policy", "critic"):
        for mine, one in zip(weights(getattr(parts, name)), weights(getattr(whole, name)), strict=True):
            torch.testing.assert_close(mine, one, rtol=1e-8, atol=1e-9)
    # the bandit's features have two time steps of 50, of which the critic takes at least one
    assert max(sizes) <= max(4 * micro_batch, 50) and (micro_batch > 1 or sizes.count(4) > 50)


class InStep(TwoProcesses):
    """Each holds a share of the weights, so that both run the policy equally often."""

    def passes(self, own: int) -> int:
        most = torch.zeros(2, dtype=torch.float64)
        most[self.rank] = own
        return int(self.sum(most).max())


@pytest.mark.parametrize("cut", [11, 50])
def test_processes_that_share_weights_run_the_policy_equally_often(cut, in_double):
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
        list(pool.map(twice, both, [_columns(experience, slice(0, cut)), _columns(experience, slice(cut, None))]))
    assert passes[0] == passes[1] and len(passes[0]) > 30
    for ppo in both:
        for name in ("policy", "critic"):
            for mine, one in zip(weights(getattr(ppo, name)), weights(getattr(whole, name)), strict=True):
                torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-9)


def _batch_size(given) -> int:
    item = given if isinstance(given, torch.Tensor) else given["state"]
    return item.numel() // item.shape[-1]


# -- the trust region -------------------------------------------------------------------------------------------------


def test_epochs_end_early_when_the_kl_is_too_large_and_the_critic_goes_on():
    ppo = learner(kind=Watching, target_kl=1e-4, lr=1e-2)
    metrics = ppo.update(bandit(ppo.policy, 640, seeded(1)))
    assert metrics["policy/stopped"] == 1 and ppo.steps.count("critic") == 40
    count = ppo.steps.count("policy")
    assert 1 < count < 20 and ppo.steps[: 2 * count] == ["critic", "policy"] * count, "none after the stop"
    assert ppo.lr == pytest.approx(1e-2 / CONFIG.lr_factor)


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
        (0.151, False, 1e-3, 5e-4),
        (0.068, False, 1e-3, 1e-3),
        (0.066, False, 1e-3, 2e-3),
        (0.1, True, 1e-3, 5e-4),
        (0.0, True, 1e-3, 5e-4),
        (0.9, False, 1.5e-5, 1e-5),
        (0.0, False, 9e-3, 1e-2),
    ],
)
def test_the_learning_rate_follows_the_kl_within_its_bounds(kl, stopped, start, expected):
    ppo = learner(target_kl=0.1, lr_factor=2.0, lr=start)
    ppo._adapt_lr(kl, stopped)
    assert ppo.lr == pytest.approx(expected)
