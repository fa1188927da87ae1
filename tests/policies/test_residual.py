"""Residual policies: initially exactly their base, which is never changed; densities and noise."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.residuals import (
    COUNTING,
    POINT,
    SMALL,
    PacingBase,
    StateEncoder,
    biased_base,
    stepping,
    stepping_base,
    tiny_base,
)
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.policy import LikelihoodPolicy, ReparametrisedPolicy, encode_observation
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import ValueCritic
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.residual import DeterministicResidual, GaussianResidual

KINDS = [DeterministicResidual, GaussianResidual]
BASES = {"function": (stepping_base, 4), "own state": (lambda: PacingBase(COUNTING), 3), "vla": (tiny_base, 3)}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(kind=DeterministicResidual, base=None, config=SMALL, spec=COUNTING, std: float = 0.0):
    """With ``std`` the residual is not 0 but a random function of its inputs."""
    torch.manual_seed(1)
    policy = kind(base or stepping_base(), StateEncoder(spec), config)
    if std:
        torch.nn.init.normal_(policy.delta.last.weight, std=std)
    return policy


def played(policy, seeds, generator) -> list[list[np.ndarray]]:
    """The actions of every episode in one environment; each episode follows the last without a pause."""
    env, state, episodes = make("counting", num_envs=1), policy.initial_state(1), []
    for seed in seeds:
        state, obs = policy.reset_state(state, np.zeros(1, int)), env.reset([0], [seed])
        episodes.append([])
        while True:
            features, state = encode_observation(policy, obs, state, generator)
            out, state = policy.act(features, state, "eval", generator)
            step = env.step(out.action.numpy())
            episodes[-1] += list(np.asarray(step.executed)[step.valid])
            obs = step.obs
            if step.done[0]:
                break
    return episodes


def equal(one: list, two: list) -> None:
    """Up to float32 within the bounds, whose second half-range is 524,288."""
    gap = np.abs(np.array(one) - np.array(two))
    assert len(one) == len(two) and gap[:, 0].max() < 1e-4 and gap[:, 1].max() < 0.1, gap.max(0)


# -- the base ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BASES)
def test_at_first_it_is_the_base_chunk_by_chunk_after_every_kind_of_end(name, kind):
    """Odd seeds are truncated, even ones terminated, mostly inside a chunk; the base's own noise is the same."""
    base, horizon = BASES[name]
    seeds = range(300, 312)
    alone, corrected = (played(policy, seeds, seeded(3)) for policy in (base(), made(kind, base())))
    assert sum(len(episode) % horizon > 0 for episode in alone) > 4
    assert len({tuple(action) for episode in alone for action in episode}) > 20
    for one, two in zip(alone, corrected, strict=True):
        equal(two, one)


def test_a_residual_can_be_the_base_of_another():
    seeds = range(300, 306)
    inner = made(base=stepping_base(), std=0.3)
    outer = DeterministicResidual(inner, StateEncoder(COUNTING), SMALL)
    for one, two in zip(played(outer, seeds, seeded(3)), played(inner, seeds, seeded(3)), strict=True):
        equal(one, two)
    with pytest.raises(UserError, match=r"DeterministicResidual has no feature_sizes, or .*give an encoder"):
        DeterministicResidual(inner)


@pytest.mark.parametrize("name", ["function", "own state"])
def test_environments_have_base_chunks_of_their_own(name):
    """Rows end at different times: every episode is what the base would do alone, through the rollout."""
    base, _ = BASES[name]
    env = make("counting", num_envs=5)
    policy = made(base=base(), config=replace(SMALL, noise=0.0))
    rollout = RolloutSource(env, policy, 90, SeedStream(300, 10**9), seeded()).next()
    found: dict[int, list[list[float]]] = {}
    for t, e in itertools.product(range(90), range(5)):
        found.setdefault(int(rollout.seeds[t, e]), []).append(rollout.executed[t, e, 0].tolist())
    ended = rollout.seeds[rollout.terminated | rollout.truncated].tolist()
    assert len(ended) > 20 and rollout.terminated.any() and rollout.truncated.any()
    for seed, alone in zip(sorted(ended), played(base(), sorted(ended), seeded()), strict=True):
        equal(found[seed], alone)


def test_the_base_is_asked_only_when_its_chunk_is_used_up():
    base = PacingBase(COUNTING)
    policy = made(base=base)
    episodes = played(policy, range(300, 306), seeded())
    assert base.batch_sizes == [1] * sum(-(-len(episode) // 3) for episode in episodes)


def test_the_rest_of_the_queue_is_observed_and_nothing_after_it():
    policy = made(config=replace(SMALL, plan=5))
    obs, state = make("counting", num_envs=2).reset([0, 1], [300, 301]), policy.initial_state(2)
    state = policy.reset_state(state, np.arange(2))
    for step in range(16):  # so often that the queue, which is a ring, has gone round
        encoded = policy.encode(replace(obs, time=obs.time + step))
        features, state = policy.context(encoded, state, seeded())
        at_call = replace(obs, time=obs.time + step - step % 4)
        chunk = policy.action_scale.normalize(torch.as_tensor(stepping(at_call)))
        rest = torch.cat([chunk[:, step % 4 + 1 :], torch.zeros(2, 2 + step % 4, 2)], 1)
        assert torch.equal(features["base_action"], chunk[:, step % 4])
        assert torch.equal(features["base_plan"], rest.flatten(1))
        assert {name: item.shape[1] for name, item in features.items() if name != "time"} == policy.feature_sizes


def test_it_corrects_by_at_most_its_scale_within_the_bounds():
    policy = made(std=5.0, spec=POINT, base=biased_base())
    base = torch.tensor([[0.9, -0.9], [-0.9, 0.9], [0.9, 0.9], [-0.9, -0.9]])
    features = {"state": torch.ones(4, 2), "base_action": base, "base_plan": torch.zeros(4, 4)}
    u = policy.delta(features)
    out, _ = policy.act(features, policy.initial_state(4), "eval", seeded())
    assert 0 < ((base + 0.5 * u).abs() > 1.1).sum() < 8
    assert torch.equal(out.sample[:, 0], u) and not out.logprob.any()
    torch.testing.assert_close(out.action[:, 0], 0.2 * (base + 0.5 * u).clamp(-1, 1))
    found = policy.rsample(features, seeded())
    torch.testing.assert_close(base + 0.5 * found.action, (base + 0.5 * u).clamp(-1, 1))  # what the bounds let through
    torch.testing.assert_close(policy.critic_action(features, out.sample, out.action), found.action)
    found.action.sum().backward()
    assert all(item.grad is not None for item in policy.trainable().values() if item.requires_grad)


def weights(module) -> str:
    return hashlib.sha256(b"".join(item.numpy().tobytes() for item in module.state_dict().values())).hexdigest()


def test_learning_leaves_the_base_alone():
    base = tiny_base()
    torch.manual_seed(1)
    policy, before = GaussianResidual(base, config=SMALL), weights(base)
    critic = ValueCritic({**policy.feature_sizes, "time": 1}, width=16)
    ppo = PPO(policy, policy.trainable(), critic, PPOConfig(critic_warmup=0, lr=1e-2), seeded())
    own = weights(policy.delta)
    ppo.update(RolloutSource(make("counting", num_envs=4), policy, 10, SeedStream(300, 10**9), seeded()).next())
    assert weights(base) == before and weights(policy.delta) != own
    assert all(parameter.grad is None for parameter in base.parameters())
    assert not {id(p) for p in base.parameters()} & {id(p) for p in policy.parameters()}


def test_a_base_that_fails_is_named():
    sick = FunctionPolicy(COUNTING, lambda obs: np.where(obs.state[:, :1, None] == 301, np.nan, stepping(obs)))
    source = RolloutSource(make("counting", num_envs=3), made(base=sick), 5, SeedStream(300, 10**9), seeded())
    with pytest.raises(NonFiniteError, match="the base FunctionPolicy chose a non-finite action in environment 1"):
        source.next()
    with pytest.raises(UserError, match=r"FunctionPolicy has no feature_sizes, or .*give an encoder"):
        DeterministicResidual(stepping_base())


@pytest.mark.parametrize("kind", KINDS)
def test_it_keeps_the_contract(kind):
    policy = made(kind)
    assert isinstance(policy, ReparametrisedPolicy) == (kind is DeterministicResidual)
    assert isinstance(policy, LikelihoodPolicy) == (kind is GaussianResidual)
    assert check_policy(policy, make("counting", num_envs=3), seeded())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_base_and_encoder(tmp_path, kind):
    for name, policy in {"encoder": made(kind, std=0.5), "vla": kind(tiny_base(), config=SMALL)}.items():
        torch.nn.init.normal_(policy.delta.last.weight, std=0.5)
        policy.delta.trunk.inputs.mean.fill_(0.3)
        policy.save_pretrained(tmp_path / name)
        restored = load_policy(tmp_path / name, COUNTING)
        assert type(restored) is kind and restored.config == SMALL and type(restored.base) is type(policy.base)
        one, two = (played(item, range(300, 304), seeded(3)) for item in (policy, restored))
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        with pytest.raises(ContractError, match="control_dt"):
            load_policy(tmp_path / name, replace(COUNTING, control_dt=0.2))


# -- exploration ------------------------------------------------------------------------------------------------------


def test_the_noise_is_an_ornstein_uhlenbeck_process():
    """Standard deviation ``noise sqrt(1 - c^(2t))``, correlation ``c`` with the step before, 0 after a reset."""
    batch, config = 20_000, replace(SMALL, noise=0.2, correlation=0.8)
    policy = made(base=biased_base(), spec=POINT, config=config)
    zeros = torch.zeros(batch, 2)
    features = {"state": zeros, "base_action": zeros, "base_plan": torch.zeros(batch, 4)}
    state, noises, generator = policy.reset_state(policy.initial_state(batch), np.arange(batch)), [], seeded()
    for t in range(1, 31):
        out, state = policy.act(features, state, "sample", generator)
        noises.append(state["noise"])
        assert float(noises[-1].std()) == pytest.approx(0.2 * (1 - 0.8 ** (2 * t)) ** 0.5, rel=0.03)
        torch.testing.assert_close(out.action[:, 0], 0.2 * noises[-1].clamp(-1, 1))
        assert not out.sample.any()
    assert float((noises[-1] * noises[-2]).mean() / 0.04) == pytest.approx(0.8, abs=0.03)
    assert (
        abs(float((noises[-1][:, 0] * noises[-1][:, 1]).mean() / 0.04)) < 0.03 and abs(float(noises[-1].mean())) < 0.01
    )
    fresh = policy.reset_state(state, np.array([3]))["noise"]
    assert not fresh[3].any() and torch.equal(fresh[4:], state["noise"][4:]) and state["noise"][3].any()
    quiet, after = policy.act(features, state, "eval", generator)
    assert not quiet.action.any() and after["noise"] is state["noise"]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_learning_sees_the_density_of_acting(dtype, bound):
    """Through rollout and PPO, which standardises the residual's inputs before it computes densities."""
    policy = made(GaussianResidual, biased_base(), spec=POINT).to(dtype)
    critic = ValueCritic({**policy.feature_sizes, "time": 1}, width=16)
    ppo = PPO(policy, policy.trainable(), critic, PPOConfig(critic_warmup=0, minibatch=7, lr=1e-3), seeded())
    source = RolloutSource(make("point_mass", num_envs=6), policy, 10, SeedStream(300, 10**9), seeded())
    for _ in range(3):
        rollout = source.next()
        assert rollout.sample.dtype == dtype and rollout.logprob.dtype == torch.float64
        assert ppo.update(rollout)["policy/logprob_gap"] <= bound * (1 if dtype == torch.float64 else 2**0.5)
