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
    HORIZON,
    POINT,
    SMALL,
    PacingBase,
    StateEncoder,
    biased_base,
    stepping,
    stepping_base,
    tiny_base,
)
from tests.toys import seeded
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3, ResidualTD3Config
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.policy import LikelihoodPolicy, ReparametrisedPolicy, encode_observation
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import QEnsemble, ValueCritic
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.policies.residual import BlendConfig, DeterministicResidual, GaussianResidual, ResidualConfig

KINDS = [DeterministicResidual, GaussianResidual]
# What both have from their base class is seen in one; the other is in the full gate.
BASES = {"function": (stepping_base, 4), "own state": (lambda: PacingBase(COUNTING), 3), "vla": (tiny_base, 3)}


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


GATE = [("function", 1), ("own state", 3), ("vla", 1)]
FULL = [("function", 2), ("function", 4), ("own state", 1), ("vla", 3)]


@pytest.mark.parametrize(
    ("name", "horizon", "kind"),
    [
        pytest.param(*case, kind, marks=[pytest.mark.full] * (case in FULL or kind is GaussianResidual))
        for case in [*GATE, *FULL]
        for kind in KINDS
    ],
)
def test_at_first_it_is_the_base_after_every_kind_of_end(name, horizon, kind):
    """Odd seeds are truncated, even ones terminated, mostly inside a chunk; the base's own noise is the same."""
    base, chunk = BASES[name]
    seeds = range(300, 306)
    corrected = made(kind, base(), replace(SMALL, horizon=horizon))
    alone, together = (played(policy, seeds, seeded(3)) for policy in (base(), corrected))
    assert sum(len(episode) % chunk > 0 for episode in alone) > 2
    assert len({tuple(action) for episode in alone for action in episode}) > 10
    for one, two in zip(alone, together, strict=True):
        equal(two, one)


def test_a_residual_can_be_the_base_of_another():
    seeds = range(300, 304)
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
    rollout = RolloutSource(env, policy, 50, SeedStream(300, 10**9), seeded()).next()
    found: dict[int, list[list[float]]] = {}
    for t, e in itertools.product(range(50), range(5)):
        found.setdefault(int(rollout.seeds[t, e]), []).append(rollout.executed[t, e, 0].tolist())
    ended = rollout.seeds[rollout.terminated | rollout.truncated].tolist()
    assert len(ended) > 10 and rollout.terminated.any() and rollout.truncated.any()
    for seed, alone in zip(sorted(ended), played(base(), sorted(ended), seeded()), strict=True):
        equal(found[seed], alone)


def test_the_base_is_asked_only_when_its_chunk_is_used_up():
    base = PacingBase(COUNTING)
    policy = made(base=base)
    episodes = played(policy, range(300, 306), seeded())
    assert base.batch_sizes == [1] * sum(-(-len(episode) // 3) for episode in episodes)


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
    policy = made(kind, config=replace(SMALL, horizon=2))
    assert isinstance(policy, ReparametrisedPolicy) == (kind is DeterministicResidual)
    assert isinstance(policy, LikelihoodPolicy) == (kind is GaussianResidual)
    assert check_policy(policy, make("counting", num_envs=3), seeded())


def test_a_checkpoint_holds_base_and_encoder(tmp_path, kind=DeterministicResidual):
    for name, policy in {"encoder": made(kind, std=0.5), "vla": kind(tiny_base(), config=SMALL)}.items():
        torch.nn.init.normal_(policy.delta.last.weight, std=0.5)
        policy.delta.trunk.inputs.mean.fill_(0.3)
        policy.save_pretrained(tmp_path / name)
        restored = load_policy(tmp_path / name, COUNTING)
        assert type(restored) is kind and restored.config == SMALL and type(restored.base) is type(policy.base)
        one, two = (played(item, range(300, 301), seeded(3)) for item in (policy, restored))
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        with pytest.raises(ContractError, match="control_dt"):
            load_policy(tmp_path / name, replace(COUNTING, control_dt=0.2))


# -- exploration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("horizon", [1, HORIZON])
def test_the_noise_is_an_ornstein_uhlenbeck_process(horizon):
    """Std ``noise sqrt(1 - c^(2t))``, correlation ``c`` with the noise before it at its place, 0 after a reset."""
    batch, config = 20_000 // horizon, replace(SMALL, horizon=horizon, plan=0, noise=0.2, correlation=0.8)
    policy = made(base=biased_base(), spec=POINT, config=config)
    zeros = torch.zeros(batch, 2 * horizon)
    features = {"state": zeros[:, :2], "base_action": zeros, "base_plan": zeros[:, :0]}
    state, noises, generator = policy.reset_state(policy.initial_state(batch), np.arange(batch)), [], seeded()
    for t in range(1, 16):
        out, state = policy.act(features, state, "sample", generator)
        noises.append(state["noise"])
        assert float(noises[-1].std()) == pytest.approx(0.2 * (1 - 0.8 ** (2 * t)) ** 0.5, rel=0.03)
        torch.testing.assert_close(out.action.flatten(1), 0.2 * noises[-1].clamp(-1, 1))
        assert not out.sample.any()
    last = noises[-1]
    assert float((last * noises[-2]).mean() / 0.04) == pytest.approx(0.8, abs=0.03)
    assert abs(float((last[:, 0] * last[:, -1]).mean() / 0.04)) < 0.05 and abs(float(last.mean())) < 0.01
    fresh = policy.reset_state(state, np.array([3]))["noise"]
    assert not fresh[3].any() and torch.equal(fresh[4:], state["noise"][4:]) and state["noise"][3].any()
    quiet, after = policy.act(features, state, "eval", generator)
    assert not quiet.action.any() and after["noise"] is state["noise"]


@pytest.mark.parametrize("horizon", [1, 2])
def test_learning_sees_the_density_of_acting(horizon):
    """Through rollout and PPO, which standardises the residual's inputs before it computes densities."""
    policy = made(GaussianResidual, biased_base(), replace(SMALL, horizon=horizon), POINT).to(torch.float64)
    critic = ValueCritic({**policy.feature_sizes, "time": 1}, width=16)
    ppo = PPO(policy, policy.trainable(), critic, PPOConfig(critic_warmup=0, minibatch=20, lr=1e-3), seeded())
    source = RolloutSource(make("point_mass", num_envs=6), policy, 10, SeedStream(300, 10**9), seeded())
    for _ in range(2):
        rollout = source.next()
        assert rollout.sample.shape[2:] == (horizon, 2) and rollout.logprob.dtype == torch.float64
        law = torch.distributions.Normal(*policy.delta({name: item[:-1] for name, item in rollout.features.items()}))
        expected = law.log_prob(rollout.sample.flatten(2)).sum(-1)
        torch.testing.assert_close(rollout.logprob, expected, atol=1e-9, rtol=0)
        assert ppo.update(rollout)["policy/logprob_gap"] <= 1e-9


def made_blend(noise: float = 0.2, **blend) -> DeterministicResidual:
    torch.manual_seed(1)
    config = replace(SMALL, noise=noise, blend=BlendConfig(**blend))
    policy = DeterministicResidual(biased_base(), StateEncoder(POINT), config)
    torch.nn.init.normal_(policy.delta.last.weight, std=0.5)
    return policy


def features(num_envs: int) -> dict[str, torch.Tensor]:
    state = torch.randn(num_envs, POINT.state.shape[0], generator=seeded(2))
    base = 0.4 * torch.rand(num_envs, 2, generator=seeded(3))
    return {"state": state, "base_action": base, "base_plan": torch.zeros(num_envs, 4)}


def acting(policy: DeterministicResidual, num_envs: int, steps: int) -> tuple[np.ndarray, list]:
    """Where the correction acts, bool [T,E], and the outputs; all episodes begin at the first step."""
    state, generator, found = policy.initial_state(num_envs), seeded(4), []
    state = policy.reset_state(state, np.arange(num_envs))
    for _ in range(steps):
        out, state = policy.act(features(num_envs), state, "sample", generator)
        found.append(out)
    return np.stack([out.aux["corrected"].numpy() for out in found]), found


@pytest.mark.parametrize(("released", "probability"), [(0, 0.2), (500, 0.6), (1000, 1.0), (5000, 1.0)])
def test_the_probability_grows_with_the_decisions(released, probability):
    policy = made_blend(decisions=1000, start=0.2)
    policy.set_released(released)
    acts, _ = acting(policy, 400, 10)
    assert acts.mean() == pytest.approx(probability, abs=0.03)  # four standard errors
    if probability < 1:
        assert acts.mean(0).min() > 0 or acts.mean(0).max() < 1, "every step draws anew"
        assert (acts.any(0) & ~acts.all(0)).mean() > 0.8


def test_a_probability_of_episodes_is_drawn_once_in_each():
    policy = made_blend(start=0.3, per="episode")
    acts, _ = acting(policy, 1000, 6)
    assert (acts == acts[0]).all() and acts[0].mean() == pytest.approx(0.3, abs=0.06)
    state = policy.reset_state(policy.initial_state(1000), np.arange(1000))
    one, state = policy.act(features(1000), state, "sample", seeded(4))
    again = policy.reset_state(state, np.arange(500))
    two, _ = policy.act(features(1000), again, "sample", seeded(5))
    same = (one.aux["corrected"] == two.aux["corrected"]).numpy()
    assert same[500:].all() and 0.4 < same[:500].mean() < 0.8


def test_the_base_plays_a_random_number_of_steps_first():
    """Up to half of the point mass's time limit, uniformly; then the correction acts to the end."""
    policy, limit = made_blend(start=1.0, delay=0.5), POINT.time_limit
    acts, _ = acting(policy, 2000, limit)
    begin = acts.argmax(0)
    assert (np.diff(acts.astype(int), axis=0) >= 0).all() and acts[-1].all()
    counts = np.bincount(begin, minlength=limit)
    half = limit // 2
    assert counts[half:].sum() == 0 and (counts[:half] > 0.6 * 2000 / half).all()


def test_where_no_correction_acts_it_is_the_base_without_noise():
    policy, given = made_blend(start=0.5), features(200)
    acts, outs = acting(policy, 200, 1)
    base = policy.action_scale.unnormalize(given["base_action"])
    unchanged = (outs[0].action[:, 0] - base).abs().amax(1) < 1e-6
    assert (unchanged.numpy() == ~acts[0]).all() and 50 < acts.sum() < 150
    explained = policy.critic_action(given, outs[0].sample, outs[0].action)
    assert float(explained[~torch.from_numpy(acts[0])].abs().max()) < 1e-5


def test_the_size_caps_the_correction_everywhere():
    policy, given = made_blend(noise=0.0, decisions=1000, size=0.1, start=1.0), features(300)
    u = policy.delta(given)
    for released, size in ((0, 0.1), (500, 0.55), (1000, 1.0)):
        policy.set_released(released)
        torch.testing.assert_close(policy.rsample(given, seeded()).action, size * u, atol=2e-5, rtol=1e-4)
        for mode in ("eval", "sample"):
            state = policy.reset_state(policy.initial_state(300), np.arange(300))
            out, _ = policy.act(given, state, mode, seeded())
            moved = policy.action_scale.normalize(out.action[:, 0]) - given["base_action"]
            torch.testing.assert_close(moved, 0.5 * size * u, atol=2e-5, rtol=1e-4)


def test_a_deployed_policy_is_never_blended():
    policy, given = made_blend(start=0.0, delay=1.0), features(50)
    state = policy.reset_state(policy.initial_state(50), np.arange(50))
    out, after = policy.act(given, state, "eval", seeded())
    torch.testing.assert_close(policy.critic_action(given, out.sample, out.action), policy.delta(given))
    assert not out.aux and (after["blend_steps"] == 0).all()


def test_what_is_released_is_published_with_the_weights(tmp_path):
    policy = made_blend(decisions=1000, start=0.2, size=0.4)
    assert not policy.released.requires_grad
    policy.set_released(500)
    weights = policy.state_dict()  # what those who act elsewhere are sent
    assert weights["released"].tolist() == pytest.approx([0.6, 0.7])
    policy.save_pretrained(tmp_path / "policy")
    loaded = DeterministicResidual.from_pretrained(tmp_path / "policy", POINT)
    assert loaded.released.tolist() == pytest.approx([0.6, 0.7]) and loaded.config == policy.config
    assert "released" not in DeterministicResidual(biased_base(), StateEncoder(POINT), SMALL).trainable()


def test_a_learner_moves_the_schedule_with_its_decisions():
    policy = made_blend(decisions=1000, start=0.2)
    critic = QEnsemble(policy.feature_sizes, 2, 2, SMALL.head)
    td3 = ResidualTD3(policy, policy.trainable(), critic, Replay(100, 0.9), ResidualTD3Config(), seeded())
    td3.guard.released = 250
    nothing = torch.zeros(1, 3, 1, dtype=torch.bool)
    idle = type("Idle", (), {"valid": nothing})()
    td3.replay.add = lambda rollout: 0
    td3.update(idle)
    assert float(policy.released[0]) == pytest.approx(0.4)


@pytest.mark.parametrize(("horizon", "plan"), [(1, 5), (2, 3)])
def test_it_reads_the_actions_that_it_corrects_and_the_next(horizon, plan):
    """The rest of the queue and nothing after it."""
    policy = made(config=replace(SMALL, horizon=horizon, plan=plan))
    obs, state = make("counting", num_envs=2).reset([0, 1], [300, 301]), policy.initial_state(2)
    state = policy.reset_state(state, np.arange(2))
    for step in range(0, 16, horizon):  # so often that the queue, which is a ring, has gone round
        features, state = policy.context(policy.encode(replace(obs, time=obs.time + step)), state, seeded())
        at_call = replace(obs, time=obs.time + step - step % 4)
        chunk = policy.action_scale.normalize(torch.as_tensor(stepping(at_call)))
        behind = torch.cat([chunk[:, step % 4 + horizon :], torch.zeros(2, plan, 2)], 1)[:, :plan]
        assert torch.equal(features["base_action"], chunk[:, step % 4 : step % 4 + horizon].flatten(1))
        assert torch.equal(features["base_plan"], behind.flatten(1))
        assert {name: item.shape[1] for name, item in features.items() if name != "time"} == policy.feature_sizes


def test_every_action_has_a_correction_of_its_own():
    policy = made(base=biased_base(), config=replace(SMALL, horizon=HORIZON, plan=0), spec=POINT, std=5.0)
    base = torch.linspace(-0.9, 0.9, 32).view(4, 8)
    features = {"state": torch.ones(4, 2), "base_action": base, "base_plan": torch.zeros(4, 0)}
    u = policy.delta(features)
    out, _ = policy.act(features, policy.initial_state(4), "eval", seeded())
    assert out.action.shape == out.sample.shape == (4, HORIZON, 2) and u.std(1).min() > 0.1
    torch.testing.assert_close(out.action, 0.2 * (base + 0.5 * u).clamp(-1, 1).view(4, HORIZON, 2))
    found = policy.rsample(features, seeded()).action
    torch.testing.assert_close(policy.critic_action(features, out.sample, out.action), found)
    torch.testing.assert_close(base + 0.5 * found, (base + 0.5 * u).clamp(-1, 1))


def test_the_base_alone_plays_its_share_in_control_steps():
    """Up to half of a time limit in steps, whatever a decision takes of it."""
    longest = {}
    for horizon in (1, HORIZON):
        config = replace(SMALL, horizon=horizon, plan=0, blend=BlendConfig(start=1.0, per="episode", delay=0.5))
        policy = made(base=biased_base(), config=config, spec=POINT)
        zeros = torch.zeros(400, 2 * horizon)
        features = {"state": zeros[:, :2], "base_action": zeros, "base_plan": zeros[:, :0]}
        state, generator, acts = policy.reset_state(policy.initial_state(400), np.arange(400)), seeded(), []
        for _ in range(0, POINT.time_limit, horizon):
            out, state = policy.act(features, state, "sample", generator)
            acts.append(out.aux["corrected"].numpy())
        longest[horizon] = int((~np.stack(acts)).sum(0).max()) * horizon
    assert longest[1] <= 0.5 * POINT.time_limit < longest[1] + 2
    assert 0 <= longest[HORIZON] - longest[1] < HORIZON


def test_a_horizon_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"ResidualConfig.horizon"):
        ResidualConfig(horizon=-1)
    beyond = COUNTING.max_chunk + 1
    with pytest.raises(UserError, match=rf"corrects {beyond} actions at once .* at most {COUNTING.max_chunk}"):
        made(config=replace(SMALL, horizon=beyond))
    policy = made(config=replace(SMALL, horizon=3))
    with pytest.raises(UserError, match=r"FunctionPolicy chose 4 actions, .* correct 3 at a time.* divides 4"):
        played(policy, [300], seeded())
    base = biased_base()
    base.horizon = 2
    whole = DeterministicResidual(base, StateEncoder(POINT), replace(SMALL, horizon=0, plan=0))
    assert whole.horizon == 2, "0 is the base's whole chunk"
