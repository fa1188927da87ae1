"""The simulator as a model, and what uses it: decisions are tried in copies, the best is executed, batches branch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.residuals import HORIZON, POINT, SMALL, StateEncoder, biased_base
from vla_rl.algorithms.guard import ReleaseConfig
from vla_rl.algorithms.residual_td3 import ResidualTD3Config
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import encode_observation
from vla_rl.experience.replay import Replay
from vla_rl.experience.rollout import RolloutSource, SeedStream
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.residual import DeterministicResidual
from vla_rl.recipes.few.selection import (
    CriticScores,
    CriticSelection,
    LatentSelection,
    Selecting,
    Selection,
    SimulatorScores,
    value_of,
)
from vla_rl.recipes.few.simulator import Consequence, Moments, Simulator, Watching
from vla_rl.recipes.few.uses import Branched, Branches, as_rollout
from world_models.latent import LatentConfig

GAMMA = 0.9


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def residual(horizon: int = HORIZON, noise: float = 0.2) -> DeterministicResidual:
    torch.manual_seed(1)
    config = replace(SMALL, horizon=horizon, plan=HORIZON - horizon, noise=noise, correlation=0.0)
    policy = DeterministicResidual(biased_base(), StateEncoder(POINT), config)
    torch.nn.init.normal_(policy.delta.last.weight, std=0.5)
    return policy


def learner(policy: DeterministicResidual):
    config = ResidualTD3Config(batch=8, learning_starts=0, num_critics=2, critic=HeadConfig(16))
    critic = QEnsemble({**policy.feature_sizes, "time": 1}, policy.corrections, 2, config.critic)
    return config.build(policy, policy.trainable(), critic, Replay(500, GAMMA), seeded(2))


@pytest.mark.parametrize("horizon", [1, HORIZON])
def test_a_decision_in_a_copy_is_what_the_environment_then_does(horizon):
    """Also where a queue of the base is half used, and with fewer copies than moments; the original does not move."""
    policy, env = residual(horizon), make("point_mass", num_envs=5)
    simulator = Simulator(make("point_mass", num_envs=3), policy, seeded())
    source = RolloutSource(env, policy, 6, SeedStream(300, 10**9), seeded(1))
    source.policy = watching = Watching(policy, simulator, env)
    rollout = source.next()
    moments = watching.take()
    assert len(moments) == 6 and all(len(one) == 5 for one in moments) and not watching.take()
    for t, moment in enumerate(moments):
        before = env.snapshot(np.arange(5))
        found = simulator.step(moment, rollout.executed[t])
        assert all(np.array_equal(before[name], item) for name, item in env.snapshot(np.arange(5)).items())
        for name in ("reward", "valid", "executed", "terminated", "truncated"):
            assert torch.equal(getattr(found, name), getattr(rollout, name)[t]), name
        runs = ~(rollout.terminated[t] | rollout.truncated[t])
        for name, item in found.after.features.items():
            torch.testing.assert_close(item[runs], rollout.features[name][t + 1][runs], rtol=0, atol=1e-6)


def test_environments_without_snapshots_are_refused():
    class Bare:
        spec = POINT

    with pytest.raises(UserError, match="has no snapshots, so no decision can be tried"):
        Simulator(Bare(), residual(), seeded())


def test_rewards_are_discounted_by_action_and_nothing_follows_an_end():
    reward, valid = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[True, True], [True, False]])
    over = torch.tensor([False, True])
    moments = Moments({}, {}, {"time": np.zeros(2)})
    found = Consequence(reward, valid, torch.zeros(2, 2, 1), over, ~over & False, over, moments).discounted(0.5)
    assert found[0].tolist() == [2.0, 3.0] and found[1].tolist() == [0.25, 0.0]


@pytest.mark.parametrize("mode", ["eval", "sample"])
def test_the_best_candidate_is_executed(mode):
    """By a value that only the simulator can tell: how far right the point is after the decision."""
    policy, env = residual(), make("point_mass", num_envs=4)
    simulator = Simulator(make("point_mass", num_envs=4), policy, seeded())
    env.reset(np.arange(4), np.arange(300, 304))
    chosen: dict[int, torch.Tensor] = {}
    for candidates in (2, 16):
        scores = SimulatorScores(env, simulator, lambda features: features["state"][:, 0], GAMMA)
        acting = Selecting(policy, candidates, scores)
        state = acting.reset_state(acting.initial_state(4), np.arange(4))
        obs = env.restore(np.arange(4), env.snapshot(np.arange(4)))
        features, state = acting.context(acting.encode(obs), state, seeded())
        out, _ = acting.act(features, state, mode, seeded(5))
        alone, _ = policy.act(features, state, "eval", seeded(5))
        chosen[candidates], its_own = scores(features, state, [out, alone])
        assert (chosen[candidates] >= its_own - 1e-6).all()
        moments = simulator.moments(env, features, state)
        reward, factor = (found := simulator.step(moments, out.action)).discounted(GAMMA)
        torch.testing.assert_close(chosen[candidates], reward + factor * found.after.features["state"][:, 0])
    assert chosen[16].mean() > chosen[2].mean() and not torch.equal(chosen[16], chosen[2])


@pytest.mark.parametrize("use", [Selection(3), CriticSelection(3), LatentSelection(LatentConfig(width=16), 3, None)])
def test_every_selection_collects_and_is_deployed(use):
    policy, env = residual(), make("point_mass", num_envs=4)
    td3 = learner(policy)
    simulator = Simulator(make("point_mass", num_envs=3), policy, seeded())
    source = RolloutSource(env, policy, 3, SeedStream(300, 10**9), seeded(1))
    in_use = use.attach(source, td3, simulator, GAMMA)
    assert isinstance(source.policy, Selecting) and source.policy.candidates == 3
    torch.nn.init.normal_(td3.critic.last.weight)
    for _ in range(3):
        td3.replay.add(rollout := source.next())
        metrics = in_use.learn(rollout, 5)
    assert bool(metrics) == isinstance(use, LatentSelection)
    other = make("point_mass", num_envs=2)
    deployed = in_use.deployed(policy, other, Simulator(make("point_mass", num_envs=2), policy, seeded()))
    obs = other.reset(np.arange(2), np.arange(2) + 500)
    features, state = encode_observation(
        deployed, obs, deployed.reset_state(deployed.initial_state(2), [0, 1]), seeded()
    )
    tried = [
        policy.act(features, state, mode, generator)[0]
        for generator in [seeded(7)]
        for mode in ("eval", "sample", "sample")
    ]
    scores = deployed.scores(features, state, tried)
    out, _ = deployed.act(features, state, "eval", seeded(7))
    best = scores.argmax(0)
    assert scores.shape == (3, 2) and len(set(scores[:, 0].tolist())) > 1
    for env_id in range(2):
        assert torch.equal(out.action[env_id], tried[int(best[env_id])].action[env_id])


@pytest.mark.parametrize("every, steps", [(1, [5, 1, 1, 9]), (4, [1, 0, 0, 3]), (16, [0, 0, 0, 1])])
def test_a_latent_model_takes_a_step_in_so_many_of_the_critics(every, steps):
    """What a rollout leaves of a count goes on in the next: of 5, 1, 1 and 9 steps, 16 in all."""
    policy, env = residual(), make("point_mass", num_envs=4)
    td3, simulator = learner(policy), Simulator(make("point_mass", num_envs=3), residual(), seeded())
    source = RolloutSource(env, policy, 3, SeedStream(300, 10**9), seeded(1))
    in_use = LatentSelection(LatentConfig(width=16), 3, None, every).attach(source, td3, simulator, GAMMA)
    trainer = in_use.deployed(policy, env, simulator).scores.trainer
    td3.replay.add(rollout := source.next())
    taken = [0]
    for count in (5, 1, 1, 9):
        in_use.learn(rollout, count)
        taken.append(trainer.steps)
    assert np.diff(taken).tolist() == steps


def test_nothing_is_selected_by_a_model_that_does_not_foresee_outcomes():
    """The first candidate, the actor's own decision, is executed until the gate opens, and again when it shuts."""
    policy, env = residual(), make("point_mass", num_envs=4)
    td3 = learner(policy)
    simulator = Simulator(make("point_mass", num_envs=3), policy, seeded())
    source = RolloutSource(env, policy, 3, SeedStream(300, 10**9), seeded(1))
    gate = ReleaseConfig(auroc=0.8, hold=0.6, least=1, decided=0)
    in_use = LatentSelection(LatentConfig(width=16), 5, gate, every=1).attach(source, td3, simulator, GAMMA)
    scores = in_use.deployed(policy, env, simulator).scores
    obs = env.reset(np.arange(4), np.arange(4) + 300)
    features, state = encode_observation(policy, obs, policy.reset_state(policy.initial_state(4), range(4)), seeded())
    tried = [policy.act(features, state, mode, seeded(i))[0] for i, mode in enumerate(("eval", "sample"))]
    td3.replay.add(rollout := source.next())
    seen = []
    for share, held in ((0.9, False), (0.7, False), (0.5, True), (0.7, True), (0.8, False)):
        scores.release.add = lambda attempts, share=share: shut(scores.release, share, gate, seen, attempts)
        metrics = in_use.learn(rollout, 1)
        assert (metrics["model/held"], metrics["model/auroc"]) == (float(held), share) or len(seen) == 1
        assert scores.held == held and bool(scores(features, state, tried).any()) == (not held)
    assert len(seen) == 5


def shut(release, share: float, gate: ReleaseConfig, seen: list, attempts) -> None:
    """As the gate decides when the latest episodes rank with ``share``."""
    seen.append(attempts)
    release.share = share
    release.open = share >= (gate.hold if release.open else gate.auroc)


def test_critics_score_the_decision_that_would_be_executed():
    policy, env = residual(), make("point_mass", num_envs=2)
    td3 = learner(policy)
    torch.nn.init.normal_(td3.critic.last.weight)
    obs = env.reset([0, 1], [300, 301])
    features, state = encode_observation(policy, obs, policy.reset_state(policy.initial_state(2), [0, 1]), seeded())
    out, _ = policy.act(features, state, "sample", seeded(3))
    found = CriticScores(td3)(features, state, [out])[0]
    u = policy.critic_action(features, out.sample, out.action)
    torch.testing.assert_close(found, td3.critic(features, u).mean(0))
    assert not torch.allclose(found, td3.critic(features, policy.rsample(features, seeded()).action).mean(0))


def branched(first: str, decisions: int = 2, share: float = 0.5):
    policy, env = residual(), make("point_mass", num_envs=4)
    td3 = learner(policy)
    simulator = Simulator(make("point_mass", num_envs=3), policy, seeded())
    source = RolloutSource(env, policy, 3, SeedStream(300, 10**9), seeded(1))
    Branches(share, decisions, first, new=6, kept=24).attach(source, td3, simulator, GAMMA)
    assert isinstance(td3.replay, Branched)
    return policy, source, td3


@pytest.mark.parametrize("first", ["executed", "actor"])
def test_branches_begin_with_what_was_executed_or_with_the_actor_and_go_on_with_it(first):
    policy, source, td3 = branched(first)
    rollout = source.next()
    td3.replay.add(rollout)
    branches = td3.replay.mixture.parts["branches"]
    slots = branches.decisions()
    found = branches.transitions(slots)
    starts = branches.columns["remaining"][slots] == 2
    real = {tuple(one.tolist()): i for i, one in enumerate(rollout.features["state"][:-1].flatten(0, 1))}
    executed = rollout.executed.flatten(0, 1)
    assert int(starts.sum()) >= 3
    for i in starts.nonzero().flatten().tolist():
        row = real[tuple(found.features["state"][i].tolist())]
        features = {name: item[i : i + 1] for name, item in found.features.items()}
        actor = policy.act(features, policy.initial_state(1), "eval", seeded())[0].action[0]
        assert torch.allclose(found.executed[i], actor, atol=1e-6) == (first == "actor")
        assert torch.equal(found.executed[i], executed[row]) == (first == "executed")
    for i in (~starts).nonzero().flatten().tolist():  # later decisions are the actor's
        if float(branches.columns["remaining"][slots][i]) != 1 or i == 0:
            continue
        features = {name: item[i : i + 1] for name, item in found.features.items()}
        actor = policy.act(features, policy.initial_state(1), "eval", seeded())[0].action[0]
        if bool(starts[i - 1]):
            torch.testing.assert_close(found.executed[i], actor, atol=1e-6, rtol=0)


def test_a_batch_has_its_share_of_branches_of_today():
    policy, source, td3 = branched("actor", decisions=1, share=0.25)
    for _ in range(8):
        td3.replay.add(source.next())
    assert td3.replay.mixture.counts(40) == {"online": 30, "branches": 10}
    branches = td3.replay.mixture.parts["branches"]
    assert len(branches) == 24, "the latest four times six"
    with torch.no_grad():
        for item in policy.delta.last.parameters():
            item.zero_()
    for _ in range(4):
        td3.replay.add(source.next())
    found = branches.transitions(branches.decisions())
    assert policy.critic_action(found.features, found.sample, found.executed).abs().max() < 1e-5, "of another actor"
    assert len(td3.replay) == len(td3.replay.mixture.parts["online"]) + 24
    td3.steps = 1
    td3.step()


def test_branches_are_whole_episodes():
    """One ends by the task, one by the time limit, one not at all: the last is truncated where it is left."""
    flags = torch.zeros(3, dtype=torch.bool)
    moments = Moments({}, {}, {"time": np.zeros(3)})

    def decision(valid, terminated, truncated) -> Consequence:
        valid = torch.tensor(valid)[:, None]
        reward = torch.ones(3, 1)
        return Consequence(
            reward, valid, torch.zeros(3, 1, 2), torch.tensor(terminated), torch.tensor(truncated), flags, moments
        )

    one = decision([True] * 3, [True, False, False], [False] * 3)
    two = decision([False, True, True], [True, False, False], [False, True, False])
    features = [{"state": torch.full((3, 1), float(t))} for t in range(3)]
    rollout = as_rollout(features, [one, two])
    assert rollout.terminated.tolist() == [[True, False, False], [False] * 3]
    assert rollout.truncated.tolist() == [[False] * 3, [False, True, True]]
    assert rollout.final_index.tolist() == [[1, 1], [1, 2]] and rollout.final_features["state"].tolist() == [[2.0]] * 2
    replay = Replay(20, GAMMA, 2)
    assert replay.add(rollout) == 5
    found = replay.transitions(replay.decisions())
    assert sorted(found.discount.tolist()) == pytest.approx([0.0, 0.81, 0.81, 0.9, 0.9])


def test_the_value_is_that_of_the_actors_own_decision():
    policy = residual()
    td3 = learner(policy)
    torch.nn.init.normal_(td3.critic.last.weight)
    features = {"state": torch.ones(2, 2), "base_action": torch.zeros(2, 8), "base_plan": torch.zeros(2, 0)}
    features["time"] = torch.zeros(2, 1)
    action = policy.rsample(features, seeded()).action
    assert action.abs().max() > 0.01
    torch.testing.assert_close(value_of(td3)(features), td3.critic(features, action).mean(0).detach())
