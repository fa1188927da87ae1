"""IQL: golden numbers, the expectile it converges to, its gradients, and the optimum of recorded data alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.off_policy_toys import Scripted, Table, critics, deployed, env_spec, recorded, seeded, squashed, transitions
from tests.toys import bandit
from vla_rl.algorithms.iql import IQL, IQLConfig, expectile_loss
from vla_rl.contract.batch import Transitions
from vla_rl.contract.errors import UserError
from vla_rl.experience.replay import Replay

QUICK = IQLConfig(batch=128, lr=3e-3, critic_lr=3e-3, tau=0.02)


@pytest.mark.parametrize(
    ("expectile", "terms", "mean"), [(0.7, (2.8, 0.3, 0.175), 1.091667), (0.9, (3.6, 0.1, 0.225), 1.308333)]
)
def test_golden_expectile_losses(expectile, terms, mean):
    found = expectile_loss(torch.tensor([2.0, -1.0, 0.5]), expectile)
    torch.testing.assert_close(found, torch.tensor(terms))
    assert float(found.mean()) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_its_minimum_is_the_expectile(expectile):
    values = torch.randn(2000, generator=seeded(), dtype=torch.float64).exp()
    grid = torch.linspace(0, 8, 16_001, dtype=torch.float64)
    minimum = grid[torch.stack([expectile_loss(values - v, expectile).mean() for v in grid[::40]]).argmin() * 40]
    above, below = (values - minimum).clamp_min(0).mean(), (minimum - values).clamp_min(0).mean()
    # The definition: what lies above weighs tau / (1 - tau) times less than what lies below.
    assert float(expectile * above / ((1 - expectile) * below)) == pytest.approx(1.0, abs=0.05)
    if expectile == 0.5:
        assert float(minimum) == pytest.approx(float(values.mean()), abs=0.03)


class ByHand(Scripted):
    """Recorded actions have the log-density ``nothing``."""

    def __init__(self) -> None:
        self.nothing = torch.nn.Parameter(torch.tensor(-2.0))

    def log_prob_of(self, features: object, action: torch.Tensor) -> torch.Tensor:
        return self.nothing.expand(action.shape) / action.shape[-1]


class Value(torch.nn.Module):
    """``V(o) = features["v"]`` [B]."""

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return features["v"]


def by_hand(**numbers: float) -> IQL:
    policy, table = ByHand(), Table(2)
    table.inputs = torch.nn.Identity()
    table.inputs.sizes = {"v": 1}
    config = replace(IQLConfig(), **numbers)
    iql = IQL(policy, {"nothing": policy.nothing}, table, Replay(8, 0.9), config, seeded())  # type: ignore[arg-type]
    iql.value = Value()  # type: ignore[assignment]
    return iql


def test_critics_are_regressed_on_the_next_value():
    next_features = {"v": torch.tensor([3.0]), "q": torch.full((1, 2), 99.0)}
    batch = transitions(reward=torch.tensor([0.5]), discount=torch.tensor([0.81]), next_features=next_features)
    torch.testing.assert_close(by_hand().target(batch), torch.tensor([0.5 + 0.81 * 3.0]))


@pytest.mark.parametrize(("value", "weight"), [(1.5, 4.481689), (2.5, 0.223130), (-8.0, 100.0)])
def test_recorded_actions_are_imitated_by_the_exponential_of_their_advantage(value, weight):
    iql = by_hand(beta=3.0)
    batch = transitions(features={"v": torch.tensor([value]), "q": torch.tensor([[2.0, 3.0]])})  # advantage 2 - value
    loss, info = iql.actor_loss(batch)
    assert info["policy/advantage_weight"] == pytest.approx(weight, rel=1e-5)
    assert float(loss.detach()) == pytest.approx(2.0 * weight, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, iql.parameters["nothing"])
    assert float(gradient) == pytest.approx(-weight, rel=1e-5)  # likelier, and no gradient through the weight


def test_the_actors_gradient_reaches_the_policy_and_no_critic():
    iql = learner()
    batch = _batch(iql)
    loss, _ = iql.actor_loss(batch)
    loss.backward()
    assert all(p.grad is not None for p in iql.learnt.values()) and iql.learnt
    assert all(p.grad is None for part in (iql.critic, iql.target_critic, iql.value) for p in part.parameters())


def test_the_value_network_has_the_critics_inputs():
    iql = learner(count=64)
    assert set(iql.value.inputs.keys) == set(iql.critic.inputs.keys)
    iql.pretrain(1)
    assert iql.value.inputs.std.item() == pytest.approx(0.58, abs=0.08)  # of what is uniform within [-1, 1]


def test_the_value_is_regressed_on_the_target_critics():
    iql = learner(count=64)
    iql.pretrain(1)
    with torch.no_grad():
        iql.critic.last.bias.add_(100.0)  # the targets stay
        batch = _batch(iql)
        action = iql.policy.critic_action(batch.features, batch.sample, batch.executed)
        error = iql.target_critic(batch.features, action).amin(0) - iql.value(batch.features)
    expected = float(expectile_loss(error, QUICK.expectile).mean())
    assert iql.critic_step(batch)["critic/value_loss"] == pytest.approx(expected, rel=1e-5)


def learner(config: IQLConfig = QUICK, count: int = 1024) -> IQL:
    policy, replay = squashed(env_spec()), Replay(20_000, 0.9)
    replay.add(recorded(count, seeded(4)))
    return config.build(policy, policy.trainable(), critics(policy), replay, seeded())


def _batch(iql: IQL) -> Transitions:
    return iql.replay.sample(64, seeded(6))


@pytest.mark.full
def test_it_reaches_the_optimum_from_recorded_decisions_alone_and_keeps_it_online():
    iql, reports = learner(), []
    assert deployed(iql.policy) < -0.2
    iql.pretrain(500, lambda step, info: reports.append((step, info)))
    assert [step for step, _ in reports] == list(range(500)) and iql.steps == 500 and iql.decisions == 0
    assert deployed(iql.policy) > -0.03
    value = float(iql.value({"state": torch.zeros(64, 1)}).mean().detach())
    assert -0.35 < value < 0.05  # near the best recorded action's 0, far above the mean's -0.76
    generator = seeded(7)
    iql.config = replace(QUICK, learning_starts=1)
    for _ in range(4):
        iql.update(bandit(iql.policy, 32, generator))
    assert iql.steps == 500 + 4 * 32 and deployed(iql.policy) > -0.03


def test_a_resumed_run_is_bit_identical():
    ours = learner(count=64)
    ours.pretrain(5)
    theirs = learner(count=64)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # as if it came from the disk
    for one in (ours, theirs):
        one.pretrain(3)
    for name, parameter in ours.parameters.items():
        assert torch.equal(parameter, theirs.parameters[name]), name
    for mine, other in zip(ours.value.state_dict().values(), theirs.value.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def test_a_policy_without_a_density_is_refused():
    with pytest.raises(UserError, match=r"log_prob_of but Scripted lacks it"):
        IQL(Scripted(), {"x": torch.nn.Parameter(torch.zeros(()))}, Table(2), Replay(8, 0.9), IQLConfig(), seeded())  # type: ignore[arg-type]
