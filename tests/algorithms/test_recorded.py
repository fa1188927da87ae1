"""RECAP of recorded episodes: returns by hand, values that have not seen the episode, weights, what can teach."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_recap import LIMIT, episodes, made
from tests.toys import seeded
from vla_rl.algorithms.chunks import demonstrated
from vla_rl.algorithms.recap import RecapConfig, outcomes_of
from vla_rl.algorithms.recorded import (
    FOLD,
    CrossFitted,
    Recorded,
    RecordedConfig,
    RecordedRecap,
    WeightedConfig,
    WeightedImitation,
    advantage_weights,
    explained,
    measure,
)
from vla_rl.contract.batch import OneProcess
from vla_rl.policies.advantage_conditioned import INDICATOR, POSITIVE


def recorded(
    lengths: list[int], success: list[bool], actions: Tensor | None = None, person: Mapping[int, int] | None = None
) -> Recorded:
    """Episodes of chunks of two actions; a person chose action ``person[step]`` of the chunk at ``step``."""
    episode = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    count, to_end = len(episode), torch.cat([torch.arange(n, 0, -1) for n in lengths])
    chunks = torch.zeros(count, 2, 2) if actions is None else actions
    state = torch.linspace(-1, 1, count)[:, None]
    features = {"state": state, "image_features": state[:, :0]}
    acted = torch.zeros(count, 2, dtype=torch.bool)
    for step, action in (person or {}).items():
        acted[step, action] = True
    shown = demonstrated(features, chunks, torch.arange(2) < to_end[:, None], torch.zeros(count, dtype=torch.long))
    return Recorded.of(shown, episode, torch.tensor(success), acted, LIMIT, RecapConfig(), folds=2)


def learner(found: Recorded, kind: Any = RecordedRecap, config: RecordedConfig | None = None) -> Any:
    policy = made(2)
    torch.manual_seed(0)
    value = CrossFitted({"state": 1}, folds=2)
    chosen = config or RecordedConfig(value_steps=20, steps=4, batch=16, lookahead=2)
    return kind(policy, policy.trainable(), value, LIMIT, chosen, seeded(1), recorded=found, block=2)


def test_every_step_is_a_decision_with_the_returns_of_recap() -> None:
    found = recorded([5, 5], [True, False])
    expected, _ = outcomes_of(episodes([[1] * 5, [1] * 5], ["success", "failure"], horizon=1), LIMIT, 1.0)
    torch.testing.assert_close(found.outcomes.target, expected.target)
    assert found.outcomes.to_end.tolist() == found.outcomes.remaining.tolist() == expected.to_end.tolist()
    assert found.success.tolist() == [True] * 5 + [False] * 5 and not found.outcomes.human.any()


def test_of_what_a_person_chose_nothing_else_is_imitated() -> None:
    found = recorded([3], [False], person={1: 1})
    assert found.outcomes.human.tolist() == [False, True, False]
    assert found.chunks.counts.tolist() == [[True, True], [False, True], [True, False]]


def test_successes_and_failures_are_dealt_to_all_folds() -> None:
    found = recorded([1] * 8, [True, True, False, False, True, True, False, False])
    fold = found.chunks.features[FOLD]
    assert [int(fold[part].sum()) for part in (found.success, ~found.success)] == [2, 2]


def test_a_value_has_not_seen_the_episode_that_it_judges() -> None:
    """Whatever became of the episodes of a fold, their own values stay the same bit for bit."""
    found = recorded([6] * 8, [True, False] * 4)
    own = found.chunks.features[FOLD] == 0
    flipped = replace(found.outcomes, target=torch.where(own, -1.0 - found.outcomes.target, found.outcomes.target))
    values = []
    for outcomes in (found.outcomes, flipped):
        agent = learner(replace(found, outcomes=outcomes))
        agent.fit_value(lambda step, info: None)
        values.append(agent.predicted(found.chunks))
    assert torch.equal(values[0][own], values[1][own]) and not torch.equal(values[0][~own], values[1][~own])


def test_a_minibatch_of_one_fold_teaches_the_others() -> None:
    value = CrossFitted({"state": 1}, folds=2)
    features = {"state": torch.rand(4, 1, generator=seeded()), FOLD: torch.zeros(4, dtype=torch.long)}
    value.calibrate(features, OneProcess())
    value.loss(features, torch.full((4,), -0.5)).backward()
    taught = [any(item.grad is not None for item in part.parameters()) for part in value.values]
    assert taught == [False, True]


def test_a_resumed_learner_takes_the_same_steps() -> None:
    found = recorded([6] * 8, [True, False] * 4)
    agent, resumed = learner(found), learner(found)
    agent.fit_value(lambda step, info: None)
    agent.update(None)
    state = copy.deepcopy(agent.state_dict())
    assert not state["kept"], "what is recorded is read again"
    resumed.load_state_dict(state)
    assert agent.update(None)["policy/loss"] == resumed.update(None)["policy/loss"]
    assert all(torch.equal(item, resumed.parameters[name]) for name, item in agent.parameters.items())


def test_good_decisions_are_the_asked_share_of_a_minibatch() -> None:
    found = recorded([1] * 10, [True] * 10)
    agent = learner(found, config=RecordedConfig(positive=0.2, positive_share=0.7))
    labelled, _ = agent.label(found.chunks, found.outcomes, torch.arange(10.0))
    assert (labelled.features[INDICATOR] == POSITIVE).tolist() == [False] * 8 + [True] * 2
    drawn = agent.sampler.draw(labelled, found.outcomes.human, 6000, seeded())
    share = torch.bincount(drawn, minlength=10) / 6000
    torch.testing.assert_close(share, torch.tensor([0.0375] * 8 + [0.35] * 2), atol=0.02, rtol=0)


def test_good_is_the_best_of_what_led_to_success() -> None:
    """Of a task half of its four decisions; a failure's are not, unless a person chose them, and do not count."""
    found = recorded([1] * 9, [False, False, True, True, True, True, False, True, True], person={6: 0})
    agent = learner(found, config=RecordedConfig(positive=0.5))
    task = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1])
    advantage = torch.tensor([0.9, 0.8, 0.4, 0.3, 0.2, 0.1, -0.9, -0.1, -0.2])
    good = agent.good(task, found.outcomes, advantage)
    assert good.tolist() == [False, False, True, True, False, False, True, True, False]


def test_advantages_are_the_mean_over_the_length_of_a_decision() -> None:
    """Two and three steps ahead, of a policy of two actions: V is -.8, -.5, -.4, -.2 and every step costs a tenth."""
    found = recorded([4], [True])
    agent = learner(found)
    value = torch.tensor([-0.8, -0.5, -0.4, -0.2])
    two, three = -0.2 - 0.4 + 0.8, -0.3 - 0.2 + 0.8
    expected = torch.tensor([(two + three) / 2, ((-0.2 - 0.2 + 0.5) + (-0.2 + 0.5)) / 2, -0.1 + 0.4, 0.0 + 0.2])
    torch.testing.assert_close(agent.advantage(found.outcomes, value), expected)


def test_weights_are_by_hand_and_decide_what_is_drawn() -> None:
    config = WeightedConfig(temperature=0.5, limit=3.0)
    advantage = torch.tensor([-0.1, -0.1, 0.1, 0.1])
    torch.testing.assert_close(advantage_weights(advantage, config), torch.tensor([-2.0, -2.0]).exp().repeat_interleave(
        2
    ).where(advantage < 0, torch.full((4,), 3.0)))  # fmt: skip
    found = recorded([1, 1, 1, 1], [True] * 4, person={0: 0})
    agent = learner(found, WeightedImitation, config)
    labelled, metrics = agent.label(found.chunks, found.outcomes, advantage)
    drawn = agent.sampler.draw(labelled, found.outcomes.human, 6000, seeded())
    share = torch.bincount(drawn, minlength=4) / 6000
    weights = torch.tensor([1.0, 0.1353, 3.0, 3.0])  # what a person did has 1 at least
    torch.testing.assert_close(share, weights / weights.sum(), atol=0.02, rtol=0)
    assert INDICATOR not in labelled.features and 0.25 < metrics["policy/effective_share"] < 1.0


def tried(helps: bool) -> Recorded:
    """150 episodes of two steps that succeed by their action, or whatever it was."""
    sign = torch.where(torch.rand(150, generator=seeded(1)) < 0.5, 1.0, -1.0)
    luck = torch.rand(150, generator=seeded(2)) < 0.5
    success = (sign > 0) if helps else luck
    actions = sign.repeat_interleave(2)[:, None, None].expand(-1, 2, 2)
    return recorded([2] * 150, success.tolist(), actions + 0.1 * torch.randn(300, 2, 2, generator=seeded(3)))


@pytest.mark.parametrize("helps", [True, False])
def test_the_measure_tells_whether_actions_decide(helps: bool) -> None:
    agent = learner(tried(helps), config=RecordedConfig(value_steps=40, batch=64, value_lr=1e-2))
    agent.fit_value(lambda step, info: None)
    found = measure(agent, {"state": 1}, seeded(4), lambda step, info: None)
    gain, low, high = found.by_action
    assert (low > 0.3) == helps and low < gain < high and found.coverage > 0.5
    said = " ".join(found.warnings())
    assert "value sees hardly more" in said and ("actions matter is not shown" in said) == (not helps)


def test_shares_of_variance_by_hand() -> None:
    found = recorded([1, 1, 1, 1], [True, False, True, False])
    target = found.outcomes.target
    assert explained(found, target) == 1.0 and explained(found, target.mean().expand(4)) == 0.0
    assert explained(found, torch.full((4,), 0.0)) == pytest.approx(-1.0)
