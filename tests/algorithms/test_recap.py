"""RECAP: returns, advantages and indicators by hand; a calibrated value; a policy that picks the good mode."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toys import ToyEncoder, rollout, seeded
from vla_rl.algorithms.chunks import DEMONSTRATED, TasksEqually
from vla_rl.algorithms.recap import Recap, RecapConfig, outcomes_of, threshold
from vla_rl.contract.batch import Rollout
from vla_rl.contract.errors import ContractError, NonFiniteError, UserError
from vla_rl.contract.policy import ActionOut
from vla_rl.policies.advantage_conditioned import INDICATOR, AdvantageConditioned, advantage_conditioned
from vla_rl.policies.critics import DistributionalValue, two_hot
from vla_rl.policies.heads import HeadConfig
from vla_rl.policies.normalization import Affine
from vla_rl.policies.tiny import TinyConfig, TinyVLA
from vla_rl.policies.vla.tokenizer import Vocabulary

LIMIT = 10


def made(horizon: int = 1) -> AdvantageConditioned:
    torch.manual_seed(0)
    spec = replace(ToyEncoder.spec, max_chunk=4)
    config = TinyConfig(horizon, queries=1, condition=32, width=64, blocks=2)
    return AdvantageConditioned(TinyVLA(spec, Vocabulary.from_texts(spec.tasks), Affine((0.0,), (1.0,)), config))


def seen(state: Tensor) -> dict[str, Tensor]:
    """The features of ``state`` [...,1]: there are no pictures."""
    return {"state": state, "image_features": state[..., :0]}


def made_learner(policy: AdvantageConditioned, **config: Any) -> Recap:
    torch.manual_seed(0)
    value = DistributionalValue({"state": 1}, HeadConfig(32, 1))
    return Recap(policy, policy.trainable(), value, LIMIT, RecapConfig(**config), seeded(1))


def episodes(valid: list[list[int]], ends: list[str], horizon: int = 2, **changes: Any) -> Rollout:
    """Columns of decisions: how many of ``horizon`` actions were valid; ends "success", "failure", "" (goes on)."""
    count = torch.tensor(valid).T  # [T,E]
    length, envs = count.shape
    mask = torch.arange(horizon) < count[..., None]
    last = [(len(column) - 1 - [c > 0 for c in column[::-1]].index(True)) for column in valid]
    ended, success = torch.zeros(2, length, envs, dtype=torch.bool)
    for env, (t, how) in enumerate(zip(last, ends, strict=True)):
        ended[t, env], success[t, env] = bool(how), how == "success"
    state = torch.arange(float((length + 1) * envs)).reshape(length + 1, envs, 1)
    actions = torch.zeros(length, envs, horizon, 2)
    none = torch.zeros(length, envs, dtype=torch.long)
    out = ActionOut(actions[0], actions[0], torch.zeros(envs), {}, 0)
    parts = {
        "sample": actions, "executed": actions, "logprob": none.double(), "reward": mask.double(), "valid": mask,
        "intervened": ~mask & mask, "terminated": ended, "truncated": ~ended & ended, "success": success,
        "version": none, "seeds": none,
    }  # fmt: skip
    found = rollout(seen(state), out, torch.zeros(1, envs, horizon))
    return replace(found, **{**parts, **changes})


def test_returns_count_the_actions_to_the_end() -> None:
    """The golden episode of five actions, succeeded and failed, in single actions and in chunks of two."""
    single = episodes([[1] * 5, [1] * 5], ["success", "failure"], horizon=1)
    found, known = outcomes_of(single, LIMIT, 300.0)
    assert known.all()
    torch.testing.assert_close(found.target[:5] * LIMIT, torch.tensor([-4.0, -3.0, -2.0, -1.0, 0.0]))
    assert found.target[5:].tolist() == [-1.0] * 5  # -304 / 10 and so on, clipped
    chunked, _ = outcomes_of(episodes([[2, 2, 1]], ["success"]), LIMIT, 1.0)
    torch.testing.assert_close(chunked.target * LIMIT, torch.tensor([-4.0, -2.0, 0.0]))
    assert chunked.to_end.tolist() == [5, 3, 1] and chunked.remaining.tolist() == [3, 2, 1]


def test_a_cheap_failure_is_told_from_a_slow_success_by_its_cost() -> None:
    found, _ = outcomes_of(episodes([[1, 1]], ["failure"], horizon=1), LIMIT, 0.5)
    torch.testing.assert_close(found.target, torch.tensor([-0.6, -0.5]))


def test_what_has_not_ended_or_broke_down_has_no_return() -> None:
    goes_on = episodes([[2, 2], [2, 0]], ["", "success"])
    _, known = outcomes_of(goes_on, LIMIT, 1.0)
    assert known.tolist() == [[False, True], [False, False]]
    broken = episodes([[2, 0]], [""])
    broken.truncated[1, 0] = True  # by a decision without valid actions
    assert not outcomes_of(broken, LIMIT, 1.0)[1].any()


def test_episodes_in_one_column_do_not_mix() -> None:
    two = episodes([[2, 1, 2, 2]], ["success"])
    two.terminated[1, 0] = True
    found, _ = outcomes_of(two, LIMIT, 1.0)
    torch.testing.assert_close(found.target, torch.tensor([-1.0, -1.0, -0.3, -0.1]))
    assert found.remaining.tolist() == [2, 1, 2, 1]


def test_advantages_by_hand() -> None:
    found, _ = outcomes_of(episodes([[2, 2, 1]], ["success"]), LIMIT, 1.0)
    value = torch.tensor([-0.7, -0.3, -0.1])
    # one decision later: -.2 - .3 + .7, -.2 - .1 + .3, and 0 + .1 at the end
    torch.testing.assert_close(found.advantage(value, 1, LIMIT), torch.tensor([0.2, 0.0, 0.1]))
    # two later: -.4 - .1 + .7, then the returns -.2 + .3 and 0 + .1
    torch.testing.assert_close(found.advantage(value, 2, LIMIT), torch.tensor([0.2, 0.1, 0.1]))


def test_what_cannot_succeed_any_more_has_no_advantage() -> None:
    found, _ = outcomes_of(episodes([[2, 2, 1]], ["failure"]), LIMIT, 1.0)
    assert found.advantage(torch.full((3,), -1.0), 1, LIMIT).tolist() == [0.0, 0.0, 0.0]


def test_the_golden_threshold_and_its_positives() -> None:
    advantage = torch.tensor([0.01, -0.02, 0.05, 0.0, -0.10, 0.07, 0.02, -0.01, 0.03, 0.04])
    every = torch.ones(10, dtype=torch.bool)
    eps = threshold(advantage, torch.zeros(10, dtype=torch.long), every, 0.3)
    torch.testing.assert_close(eps, torch.full((10,), 0.033))
    assert (advantage >= eps).nonzero().flatten().tolist() == [2, 5, 9]


def test_every_task_has_a_threshold_of_its_autonomous_decisions() -> None:
    advantage = torch.tensor([0.0, 1.0, 9.0, 10.0, 99.0, 5.0])
    task, autonomous = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([True, True, True, True, False, False])
    found = threshold(advantage, task, autonomous, 0.5)
    assert found.tolist() == [0.5, 0.5, 9.5, 9.5, 9.5, math.inf]


def test_what_a_person_did_is_always_good() -> None:
    agent = made_learner(made(2), positive=0.0)
    human = torch.tensor([[[False, True], [False, False]]])
    found = episodes([[2], [2]], ["failure", "failure"], intervened=human)
    agent.add(found)
    agent.add(replace(found, intervened=torch.zeros_like(human), version=torch.full((1, 2), DEMONSTRATED)))
    assert agent.kept is not None and agent.outcomes is not None
    assert agent.kept.counts.tolist() == [[False, True], [True, True], [True, True], [True, True]]
    agent.add(episodes([[2]], ["success"]))
    labelled, metrics = agent.labelled(agent.kept, agent.outcomes)
    assert labelled.features[INDICATOR].tolist() == [1, 0, 1, 1, 1]
    assert metrics["rollout/human"] == pytest.approx(3 / 5)


def test_too_old_decisions_are_counted_and_not_imitated() -> None:
    agent = made_learner(made(2), max_age=1)
    agent.add(episodes([[2], [2]], ["success", "success"]))
    agent.add(episodes([[2]], ["success"], version=torch.full((1, 1), DEMONSTRATED)))
    agent.policy.version = 2
    agent.add(episodes([[2]], ["success"], version=torch.full((1, 1), 1)))
    assert agent.kept is not None and agent.outcomes is not None
    labelled, metrics = agent.labelled(agent.kept, agent.outcomes)
    assert labelled.version.tolist() == [DEMONSTRATED, 1] and metrics["rollout/too_old"] == 2.0


def test_the_two_bins_of_a_return_are_the_golden_ones() -> None:
    found = two_hot(torch.tensor([-0.4321, 0.0, -1.0, -0.5]), 201)
    assert found[0].nonzero().flatten().tolist() == [113, 114]
    torch.testing.assert_close(found[0, 113:115], torch.tensor([0.42, 0.58]), atol=1e-4, rtol=0)
    assert found[1, 200] == 1 and found[2, 0] == 1 and found[3, 100] == pytest.approx(1)
    torch.testing.assert_close(found.sum(1), torch.ones(4))


def test_the_value_becomes_the_distribution_of_returns() -> None:
    """Where three of four episodes succeed at once, and where they all do after five actions of ten."""
    torch.manual_seed(0)
    value = DistributionalValue({"state": 1}, HeadConfig(32, 1))
    state = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [1.0]])
    target = torch.tensor([0.0, 0.0, 0.0, -1.0, -0.4, -0.4, -0.4, -0.4])
    assert value({"state": state}).tolist() == pytest.approx([-0.5] * 8)  # uniform at first
    adam = torch.optim.Adam(value.parameters(), 1e-2)
    for _ in range(300):
        adam.zero_grad()
        value.loss({"state": state}, target).backward()
        adam.step()
    chance = value.logits({"state": torch.tensor([[0.0], [1.0]])}).softmax(-1).detach()
    assert chance[0, 200] == pytest.approx(0.75, abs=0.02) and chance[0, 0] == pytest.approx(0.25, abs=0.02)
    assert chance[1, 120] == pytest.approx(1.0, abs=0.03)
    assert value({"state": torch.tensor([[0.0], [1.0]])}).tolist() == pytest.approx([-0.25, -0.4], abs=0.02)


def tried(count: int, seed: int) -> Rollout:
    """One action in each of ``count`` states: half of them good (around .5), half bad (around -.5)."""
    state = 2 * torch.rand(count, 1, generator=seeded(seed)) - 1
    good = torch.rand(count, generator=seeded(seed + 1)) < 0.5
    noise = 0.1 * torch.randn(count, 1, 2, generator=seeded(seed + 2))
    actions = torch.where(good, 0.5, -0.5)[:, None, None] + noise
    out = ActionOut(actions, actions, torch.zeros(count), {}, 0)
    return rollout(seen(torch.stack([state, state])), out, torch.zeros(1, count, 1), success=good[None])


def good_share(policy: AdvantageConditioned, guidance: float) -> tuple[float, Tensor]:
    """How often it picks the good mode, and its actions [B,1,2]."""
    policy.config = replace(policy.config, guidance=guidance)
    state = torch.linspace(-1, 1, 400)[:, None]
    out, _ = policy.act(seen(state), {}, "eval", seeded(5))
    return float((out.action[..., 0] > 0).double().mean()), out.action


@pytest.mark.full
def test_the_conditioned_policy_picks_the_good_actions() -> None:
    policy = made()
    agent = made_learner(policy, value_steps=100, steps=600, batch=128, lr=3e-3, positive=0.5)
    metrics = agent.update(tried(1000, 7))
    assert metrics["policy/positive"] == pytest.approx(0.5, abs=0.05)
    mixture, _ = good_share(policy, 0.0)
    conditioned, actions = good_share(policy, 1.0)
    assert abs(mixture - 0.5) < 0.12
    assert conditioned > 0.97 and actions.mean() == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(
    ("dropout", "learnt"), [(0.0, [True, True, False]), (0.3, [True] * 3), (1.0, [False] * 2 + [True])]
)
def test_the_indicator_is_left_out_as_often_as_asked(dropout: float, learnt: list[bool]) -> None:
    policy = made()
    made_learner(policy, steps=3, value_steps=1, dropout=dropout).update(tried(64, 0))
    assert policy.indicators.weight.any(1).tolist() == learnt  # negative, positive, unknown: all 0 at first


@pytest.mark.full
def test_guidance_above_one_sharpens() -> None:
    """Success is likelier the larger the action: the more guidance, the larger the actions."""
    policy = made()
    count = 1500
    action = 0.3 * torch.randn(count, 1, 2, generator=seeded(2))
    success = torch.rand(count, generator=seeded(3)) < torch.sigmoid(8 * action[:, 0, 0])
    state = torch.zeros(count, 1)
    out = ActionOut(action, action, torch.zeros(count), {}, 0)
    shown = rollout(seen(torch.stack([state, state])), out, torch.zeros(1, count, 1), success=success[None])
    made_learner(policy, value_steps=50, steps=600, batch=128, lr=3e-3, positive=0.5).update(shown)
    means = [float(good_share(policy, beta)[1][..., 0].mean()) for beta in (0.0, 1.0, 2.0)]
    assert means[0] + 0.1 < means[1] and means[1] + 0.05 < means[2]


def test_an_untrained_indicator_changes_nothing() -> None:
    policy = made(2)
    state = torch.rand(7, 1, generator=seeded())
    base, _ = policy.base.act(seen(state), {}, "eval", seeded(4))
    for beta in (0.0, 0.7, 1.0, 2.0):
        policy.config = replace(policy.config, guidance=beta)
        found, _ = policy.act(seen(state), {}, "eval", seeded(4))
        torch.testing.assert_close(found.action, base.action, atol=1e-6, rtol=0)


def test_vectors_that_begin_apart_leave_the_policy_of_good_decisions_as_its_base() -> None:
    base, features = made().base, seen(torch.tensor([[0.3]]))
    policy = advantage_conditioned(base, 1.0, spread=3.0)
    assert isinstance(policy, AdvantageConditioned)
    x, t = torch.full((1, 1, 2), 0.5), torch.tensor([0.25])
    good, plain = policy.field(features)(x, t).velocity, base.field(features)(x, t).velocity
    torch.testing.assert_close(good, plain, rtol=0, atol=0)
    policy.guide(0.0)
    assert not torch.allclose(policy.field(features)(x, t).velocity, plain)


def test_guidance_extrapolates_the_velocity() -> None:
    policy = made(2)
    torch.nn.init.normal_(policy.indicators.weight, generator=seeded(3))
    features, x, t = (
        seen(torch.rand(3, 1, generator=seeded())),
        torch.randn(3, 1, 4, generator=seeded()),
        torch.rand(3, 1),
    )
    at = {}
    for beta in (0.0, 1.0, 2.5):
        policy.config = replace(policy.config, guidance=beta)
        at[beta] = policy.field(features)(x, t).velocity
    torch.testing.assert_close(at[2.5], at[0.0] + 2.5 * (at[1.0] - at[0.0]), atol=1e-5, rtol=1e-5)
    unknown = policy.indicated_field({**features, INDICATOR: torch.full((3,), 2)})(x, t).velocity
    good = policy.indicated_field(features)(x, t).velocity
    torch.testing.assert_close(at[0.0], unknown)
    torch.testing.assert_close(at[1.0], good)


def test_a_resumed_learner_is_the_same_bit_for_bit() -> None:
    agent, resumed = (made_learner(made(), steps=4, value_steps=4) for _ in range(2))
    agent.update(tried(40, 0))
    resumed.load_state_dict(copy.deepcopy(agent.state_dict()))
    for each in (agent, resumed):
        each.update(tried(40, 10))
    for name, parameter in agent.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name])
    assert agent.outcomes is not None and len(agent.outcomes.target) == 80


class Losses(TasksEqually):
    """Remembers how many losses it was told of."""

    count = 0

    def record(self, losses: Tensor) -> None:
        self.count += len(losses)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_its_sampler_is_resumed_with_it() -> None:
    agent, resumed = (made_learner(made(), steps=2, value_steps=2, batch=8) for _ in range(2))
    told = Losses()
    agent.sampler, resumed.sampler = Losses(), told
    agent.update(tried(40, 0))
    resumed.load_state_dict(copy.deepcopy(agent.state_dict()))
    assert told.count == 16


def test_the_oldest_decisions_leave() -> None:
    agent = made_learner(made(2), capacity=3)
    for _ in range(2):
        agent.add(episodes([[2, 2]], ["success"]))
    assert agent.outcomes is not None and agent.outcomes.remaining.tolist() == [1, 2, 1]


def test_what_cannot_be_learnt_from_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="condition"):
        AdvantageConditioned(ToyEncoder())  # type: ignore[arg-type]
    agent = made_learner(made(2))
    assert agent.update(episodes([[2, 2]], [""])) == {"rollout/decisions": 0.0, "rollout/unfinished_decisions": 2.0}
    with pytest.raises(ContractError, match="version 3"):
        agent.update(episodes([[2]], ["success"], version=torch.full((1, 1), 3)))
    with pytest.raises(NonFiniteError, match="not finite"):
        agent.update(episodes([[2]], ["success"], executed=torch.full((1, 1, 2, 2), math.nan)))
