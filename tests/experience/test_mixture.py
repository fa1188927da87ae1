"""Batches in stated shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.experience.test_replay import line, same
from tests.toys import seeded
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.experience.mixture import Mixture, concatenate
from vla_rl.experience.replay import Interventions, Replay


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


@pytest.mark.parametrize("shares", [{"online": 1.0}, {"online": -1.0, "person": 2.0}, {"online": 0, "person": 0}])
def test_shares_that_fit_nothing_are_refused(shares):
    with pytest.raises(UserError, match="no batch could be drawn"):
        Mixture({"online": replay(0), "person": replay(1)}, shares)


def test_a_mixture_needs_an_online_part():
    with pytest.raises(UserError, match=r"\['demonstrations'\] is 'online'"):
        Mixture({"demonstrations": replay(0)}, {"demonstrations": 1.0})
