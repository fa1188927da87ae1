"""The executed actions of a rollout, and the context of policies that have one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sims.catalog import make
from tests.auditing import AuditingPolicy
from tests.experience.test_groups import LuckyEnv
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream

NUM_ENVS = 5


class Supervised:
    """The counting environment with a person who replaces every third action by its negative."""

    def __init__(self) -> None:
        self.env = make("counting", num_envs=NUM_ENVS)
        self.spec, self.num_envs, self.reset = self.env.spec, NUM_ENVS, self.env.reset

    def step(self, chunk, observe="last"):
        step = self.env.step(chunk, observe)
        acted = step.valid & (step.executed[..., 0].astype(int) % 3 == 0)
        executed = np.where(acted[..., None], -step.executed, step.executed)
        return replace(step, executed=executed, intervened=acted)


def test_executed_holds_executed_actions_and_chosen_ones_after_an_end():
    """So its features do not reveal the end of the episode to a critic."""
    sources = [
        RolloutSource(Supervised(), AuditingPolicy(4), 20, SeedStream(300, 10**9), torch.Generator()),
        GroupConfig(2, 3, 1, 20).build(Supervised(), AuditingPolicy(4), SeedStream(300, 400), torch.Generator()),
    ]
    for rollout in (source.next() for source in sources):
        acting = rollout.valid.any(-1)
        chosen = rollout.sample[acting]
        changed = (rollout.valid & (rollout.sample[..., 0] % 3 == 0))[acting]
        assert torch.equal(rollout.intervened[acting], changed) and 20 < changed.sum() < changed.numel() / 2
        assert torch.equal(rollout.executed[acting], torch.where(changed[..., None], -chosen, chosen))
        assert (~rollout.valid)[acting].sum() > 5


class Contextual(AuditingPolicy):
    """Its features hold the state of each environment: seed and step that are due, and whether it was just reset."""

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.encoded = 0

    def context(self, features, state, generator):
        self.encoded += len(features["counters"])
        return {**features, "context": torch.stack([state["seed"], state["steps"], state["fresh"].long()], 1)}, state


def test_every_observation_gets_the_context_of_its_own_episode():
    policy = Contextual(4)
    rollout = RolloutSource(
        make("counting", num_envs=NUM_ENVS), policy, 30, SeedStream(300, 10**9), torch.Generator()
    ).next()
    counters, context = rollout.features["counters"], rollout.features["context"]
    fresh = context[..., 2] == 1
    assert torch.equal(context[~fresh][:, :2], counters[~fresh]) and not counters[fresh][:, 1].any()
    ended = rollout.terminated | rollout.truncated
    assert torch.equal(fresh[1:], ended) and fresh[0].all()
    finals = torch.cat([rollout.final_features["counters"], torch.zeros(len(rollout.final_index), 1)], 1)
    assert len(finals) > 5 and torch.equal(rollout.final_features["context"], finals.long())
    assert policy.encoded == 31 * NUM_ENVS + len(finals)


def test_a_truncated_group_member_gets_the_context_of_its_own_environment():
    policy = Contextual(4)
    config = GroupConfig(groups=6, size=4, ahead=2, limit=40)
    source = config.build(LuckyEnv(9), policy, SeedStream(300, 9000), torch.Generator())
    rollouts = [source.next() for _ in range(4)]
    finals = [(part.final_features["counters"], part.final_features["context"]) for part in rollouts]
    assert sum(len(counters) for counters, _ in finals) > 20
    for counters, context in finals:
        assert torch.equal(context, torch.cat([counters, torch.zeros(len(counters), 1, dtype=torch.long)], 1))
    for part in rollouts:
        assert torch.equal(part.final_features["counters"][:, 0], part.seeds[tuple(part.final_index.T)])
        played, fresh = part.valid.any(-1), part.features["context"][:-1, ..., 2] == 1
        same = (part.features["context"][:-1, ..., :2] == part.features["counters"][:-1]).all(-1)
        assert (same | fresh)[played].all() and torch.equal(fresh[0], played[0])


class Stopping(AuditingPolicy):
    """Fails at its fourth decision, so that a test can inspect the collected data."""

    calls = 0

    def act(self, features, state, mode, generator):
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("stopped")
        return super().act(features, state, mode, generator)


def test_sources_keep_no_pictures_beside_the_features():
    """The policy decides whether pictures are kept; those of the environment are freed at once."""
    windows = RolloutSource(
        make("counting", num_envs=NUM_ENVS), Stopping(4), 9, SeedStream(300, 10**9), torch.Generator()
    )
    groups = GroupConfig(2, 3, 1, 20).build(LuckyEnv(5), Stopping(4), SeedStream(300, 400), torch.Generator())
    for source in (windows, groups):
        with pytest.raises(RuntimeError, match="stopped"):
            source.next()
    for decision in [*windows._window.decisions, *groups._decisions]:
        assert not decision.obs.images and not decision.step.obs.images and not decision.step.frames
    assert len(windows._window.decisions) == len(groups._decisions) == 3
