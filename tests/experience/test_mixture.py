"""Batches in stated shares."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.experience.replays import line, same
from tests.toys import seeded
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.mixture import Mixture, Strata, concatenate
from vla_rl.experience.replay import Interventions, Replay
from vla_rl.fleet.sampler import AdaptiveSampler, SamplerConfig


def replay(number, filled=True):
    """Three decisions whose ids are ``number`` and the two after it."""
    replay = Replay(20, 1.0)
    if filled:
        replay.add(line([1.0, 2.0, 3.0], number))
    return replay


def mixture(filled=(True, True, True), shares=(0.5, 0.25, 0.25)):
    names = ("demonstrations", "online", "person")
    parts = {name: replay(100 * i, is_filled) for i, (name, is_filled) in enumerate(zip(names, filled, strict=True))}
    return Mixture(parts, dict(zip(names, shares, strict=True)))


def parts_of(batch):
    return torch.bincount(batch.features["id"] // 100, minlength=3).tolist()


@pytest.mark.parametrize("shares", [(0.5, 0.25, 0.25), (1, 1, 1), (0.2, 0.3, 0.7), (3, 0, 2)])
def test_shares_are_kept_to_within_rounding_and_add_up(shares):
    mixed = mixture(shares=shares)
    for size in range(1, 30):
        counts = list(mixed.counts(size).values())
        assert sum(counts) == size and min(counts) >= 0
        exact = [size * share / sum(shares) for share in shares]
        assert all(abs(count - share) < 1 + 1e-9 for count, share in zip(counts, exact, strict=True))
        assert not any(count for count, share in zip(counts, shares, strict=True) if not share)
    assert parts_of(mixed.sample(80, seeded())) == list(mixed.counts(80).values())
    assert mixture().counts(80) == {"demonstrations": 40, "online": 20, "person": 20}


def test_the_other_parts_take_the_share_of_an_empty_part():
    mixed = mixture((True, False, True))
    assert len(mixed) == 6 and mixed.counts(90) == {"demonstrations": 60, "online": 0, "person": 30}
    assert parts_of(mixed.sample(90, seeded())) == [60, 0, 30]
    assert mixed.add(line([1.0, 2.0], 100)) == 2 and len(mixed) == 8
    assert parts_of(mixed.sample(80, seeded())) == [40, 20, 20]
    with pytest.raises(UserError, match=r"none of the replay buffers .* holds a decision yet"):
        mixture((False, True, False), (1.0, 0.0, 1.0)).sample(3, seeded())


def test_a_part_without_a_share_counts_for_nothing():
    mixed = mixture((True, True, True), (1.0, 0.0, 1.0))
    assert len(mixed) == 6 and mixed.counts(7)["online"] == 0
    assert len(mixture((False, True, False), (1.0, 0.0, 1.0))) == 0


def test_new_rollouts_are_added_online_and_views_follow():
    online = replay(0, False)
    mixed = Mixture({"online": online, "person": Interventions(online)}, {"online": 0.5, "person": 0.5})
    assert mixed.add(line([1.0, 2.0], intervened=torch.tensor([False, True])[:, None, None])) == 2
    batch = mixed.sample(10, seeded())
    assert len(online) == 2 and batch.intervened.sum() >= 5 and batch.features["id"][5:].tolist() == [1] * 5


def test_a_batch_is_its_parts_one_after_the_other():
    one, two = replay(0).sample(3, seeded()), replay(100).sample(4, seeded())
    both = concatenate([one, two])
    for name in type(one).__dataclass_fields__:
        items = [getattr(batch, name) for batch in (one, two, both)]
        if isinstance(items[0], dict):
            items = [item["id"] for item in items]
        assert torch.equal(items[2], torch.cat(items[:2])), name
    with pytest.raises(ContractError, match=r"\['id'\] and \['id', 'time'\], so they cannot share a batch"):
        concatenate([one, replace(two, features={**two.features, "time": two.reward})])


def test_a_saved_mixture_resumes_bit_for_bit():
    one, two = mixture(), mixture((False, False, False))
    two.load_state_dict(one.state_dict())
    assert same(one.sample(31, seeded(3)), two.sample(31, seeded(3)))


# -- by task and kind of data: what is drawn, what is too old, and that the learner's losses are heard -----------------

ONLINE, CORRECTED, RECORDED = range(3)


@dataclass
class Learner:
    version: int = 0


@dataclass
class Listening:
    """A sampler that draws every stratum in turn, and keeps what it is told."""

    told: list[Any] = field(default_factory=list)

    def draw(self, counts: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
        present = np.argwhere(counts > 0)
        return present[np.arange(size) % len(present)]

    def record(self, drawn: np.ndarray, losses: np.ndarray) -> None:
        self.told.append((drawn, losses))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def episode(number: int, task: int, human: bool = False, version: int = 0) -> Rollout:
    """Three decisions with ids ``number`` and the two after it."""
    every = torch.ones(3, 1, dtype=torch.long)
    person = torch.full((3, 1, 1), human)
    return line([1.0, 2.0, 3.0], number, task=task * every, intervened=person, version=version * every)


def strata(sampler: Any, learner: Learner, max_age: int = 5) -> Strata:
    """Task 0 with all strata, task 1 without a correction, task 2 recorded only."""
    online, recorded = Replay(100, 1.0), Replay(100, 1.0)
    for number, task, human in ((0, 0, False), (100, 0, True), (200, 1, False)):
        online.add(episode(number, task, human))
    for number, task in ((300, 0), (400, 1), (500, 2)):
        recorded.add(episode(number, task))
    return Strata(online, recorded, sampler, lambda: learner.version, max_age)


def test_counts_are_those_of_tasks_and_kinds() -> None:
    found = strata(Listening(), Learner())
    assert found.counts().tolist() == [[3, 3, 3], [3, 0, 3], [0, 0, 3]] and len(found) == 18


def test_what_is_drawn_is_of_its_task_and_stratum() -> None:
    sampler, learner = Listening(), Learner()
    buffer = strata(sampler, learner)
    batch = buffer.sample(600, seeded())
    buffer.read_losses(torch.arange(600.0))
    ((drawn, losses),) = sampler.told
    assert losses.tolist() == list(range(600))
    of = {(0, ONLINE): 0, (0, CORRECTED): 1, (1, ONLINE): 2, (0, RECORDED): 3, (1, RECORDED): 4, (2, RECORDED): 5}
    assert (batch.features["id"] // 100).tolist() == [of[task, kind] for task, kind in drawn.tolist()]
    assert batch.task.tolist() == drawn[:, 0].tolist()
    assert set(batch.features["id"].tolist()) == {100 * part + i for part in range(6) for i in range(3)}


def test_old_decisions_are_not_drawn_and_old_corrections_are() -> None:
    learner = Learner()
    buffer = strata(Listening(), learner)
    learner.version = 5
    assert buffer.counts()[0].tolist() == [3, 3, 3]
    learner.version = 6
    assert buffer.counts().tolist() == [[0, 3, 3], [0, 0, 3], [0, 0, 3]]
    assert not set((buffer.sample(200, seeded()).features["id"] // 100).tolist()) & {0, 2}
    buffer.add(episode(600, 1, version=6))
    assert buffer.counts()[1].tolist() == [3, 0, 3]


def test_the_adaptive_sampler_draws_what_is_not_learnt_yet() -> None:
    """Of one task: equal shares at first, then the upper bound once robots' data have the larger loss."""
    online, recorded = Replay(100, 1.0), Replay(100, 1.0)
    online.add(episode(0, 0))
    recorded.add(episode(100, 0))
    buffer = Strata(online, recorded, AdaptiveSampler(SamplerConfig(a=1.0)), lambda: 0, 5)
    generator = seeded()

    def share() -> float:
        return float((buffer.sample(4000, generator).features["id"] < 100).double().mean())

    assert share() == pytest.approx(0.5, abs=0.04)
    batch = buffer.sample(64, generator)
    buffer.read_losses(torch.where(batch.features["id"].flatten() < 100, 9.0, 0.0))
    assert share() == pytest.approx(0.8, abs=0.04)


def test_losses_are_of_the_batch_whatever_was_drawn_since() -> None:
    """A learner that fits its normalization draws more, between its first batch and the losses of that."""
    sampler = Listening()
    buffer = strata(sampler, Learner())
    buffer.sample(6, seeded())
    buffer.sample(600, seeded())
    buffer.read_losses(torch.arange(6.0))
    ((drawn, losses),) = sampler.told
    assert len(drawn) == len(losses) == 6


def test_a_saved_one_draws_the_same() -> None:
    buffer, other = (strata(AdaptiveSampler(), Learner()) for _ in range(2))
    buffer.add(episode(700, 1))
    buffer.sample(64, seeded())
    buffer.read_losses(torch.linspace(0, 3, 64))
    other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    first, second = (each.sample(50, seeded(3)).features["id"] for each in (buffer, other))
    assert torch.equal(first, second) and other.counts()[1, ONLINE] == 6
