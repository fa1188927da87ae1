"""What a rollout keeps of what was done, and what policies with a context of their own are asked."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import torch

from sims.catalog import make
from tests.auditing import AuditingPolicy
from vla_rl.experience.groups import GroupConfig
from vla_rl.experience.rollout import RolloutSource, SeedStream

ROWS = 5


class Supervised:
    """The counting environment with somebody who now and then replaces a whole action by the negative step."""

    def __init__(self) -> None:
        self.env = make("counting", num_envs=ROWS)
        self.spec, self.num_envs, self.reset = self.env.spec, ROWS, self.env.reset

    def step(self, chunk, observe="last"):
        step = self.env.step(chunk, observe)
        acted = step.valid & (step.executed[..., 0].astype(int) % 3 == 0)
        executed = np.where(acted[..., None], -step.executed, step.executed)
        return replace(step, executed=executed, intervened=acted)


def test_executed_is_what_was_done_and_after_an_end_what_had_been_chosen():
    """So nothing in it tells a critic that the episode ends."""
    sources = [
        RolloutSource(Supervised(), AuditingPolicy(4), 20, count(300), torch.Generator()),
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
    """Stores what its state says of each row: the seed and step that it should show, and whether it was just reset."""

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self.looks = 0

    def context(self, features, state, generator):
        self.looks += len(features["counters"])
        return {**features, "told": torch.stack([state["seed"], state["steps"], state["fresh"].long()], 1)}, state


def test_every_observation_gets_its_context_the_last_one_that_of_its_own_episode():
    policy = Contextual(4)
    rollout = RolloutSource(make("counting", num_envs=ROWS), policy, 30, count(300), torch.Generator()).next()
    seen, told = rollout.features["counters"], rollout.features["told"]
    fresh = told[..., 2] == 1
    assert torch.equal(told[~fresh][:, :2], seen[~fresh]) and not seen[fresh][:, 1].any()
    ended = rollout.terminated | rollout.truncated
    assert torch.equal(fresh[1:], ended) and fresh[0].all()
    finals = torch.cat([rollout.final_features["counters"], torch.zeros(len(rollout.final_index), 1)], 1)
    assert len(finals) > 5 and torch.equal(rollout.final_features["told"], finals.long())
    assert policy.looks == 31 * ROWS + len(finals)
