"""IQL: golden numbers, the expectile it converges to, its gradients, and the optimum of recorded data alone."""

from __future__ import annotations

import copy
import math
from dataclasses import fields, replace

import pytest
import torch

from tests.off_policy_toys import Scripted, Table, critics, env_spec, recorded, squashed, transitions
from tests.toys import bandit, bandit_reward, deployed, same, seeded
from vla_rl.algorithms.offline import (
    IQL,
    WSRL,
    CalQL,
    CalQLConfig,
    IQLConfig,
    WSRLConfig,
    conservative_penalty,
    expectile_loss,
    repeated,
)
from vla_rl.algorithms.sac import SAC, SACConfig
from vla_rl.contract.batch import Transitions
from vla_rl.contract.errors import UserError
from vla_rl.contract.policy import CriticAction
from vla_rl.experience.mixture import Mixture
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
def test_recorded_actions_are_imitated_by_exp_of_their_advantage(value, weight):
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
def test_iql_reaches_the_optimum_from_recorded_decisions():
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


QUICK_CALQL = CalQLConfig(
    batch=64,
    num_critics=2,
    lr=3e-3,
    critic_lr=3e-3,
    tau=0.02,
    temperature=0.1,
    temperature_lr=1e-2,
    conservatism=1.0,
    actions=4,
)
UNIFORM, CHOSEN = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[2.0, 0.5, 1.5, -1.0]]])
LOGPROB, RECORDED = torch.tensor([[-0.5, -1.0, -0.2, -0.7]]), torch.tensor([[1.2]])


@pytest.mark.parametrize(("bound", "penalty"), [(1.0, 2.436428), (-math.inf, 2.211660)])
def test_golden_penalties(bound, penalty):
    found = conservative_penalty(UNIFORM, CHOSEN, LOGPROB, RECORDED, torch.tensor([bound]), 1)
    assert found.shape == (1, 1) and float(found) == pytest.approx(penalty, abs=1e-5)


def test_the_sum_estimates_the_integral_over_all_actions():
    """So the weights are right: uniform in the square, and the policy's own density."""
    policy, count = squashed(env_spec(), std=0.8), 20_000
    made = policy.rsample(repeated({"state": torch.zeros(1, 1)}, count), seeded(2))
    uniform = 2 * torch.rand(count, 2, generator=seeded(3)) - 1
    q = lambda action: -2.0 * (action - 0.2).square().sum(-1)  # noqa: E731
    found = conservative_penalty(
        q(uniform)[None, None],
        q(made.action)[None, None],
        made.logprob[None],
        torch.zeros(1, 1),
        torch.full((1,), -torch.inf),
        2,
    )
    line = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    integral = torch.trapezoid(torch.exp(-2.0 * (line - 0.2).square()), line).square()
    assert float(found.detach()) - math.log(2 * count) == pytest.approx(math.log(float(integral)), abs=0.02)


class Several(Scripted):
    """Decides 1, 2, 3 ... for the copies of a decision."""

    def rsample(self, features: dict[str, torch.Tensor], generator: object) -> CriticAction:
        order = 1.0 + torch.arange(len(features["q"])) % 3
        return CriticAction(order[:, None], features["logp"])


class Crossed(Table):
    """The first critic's values rise with the action, the second one's fall."""

    def forward(self, features: dict[str, torch.Tensor], action: torch.Tensor) -> torch.Tensor:
        return (features["q"] + self.bias).T + torch.stack([action[:, 0], -action[:, 0]])


def test_the_target_is_the_best_of_several_actions():
    parameters = {"nothing": torch.nn.Parameter(torch.zeros(()))}
    config = CalQLConfig(num_critics=2, actions=3)
    learner = CalQL(Several(), parameters, Crossed(2), Replay(8, 0.9), config, seeded())  # type: ignore[arg-type]
    next_features = {"q": torch.tensor([[0.0, 4.5], [0.0, 10.0]]), "logp": torch.full((2,), -50.0)}
    batch = transitions(reward=torch.zeros(2), discount=torch.tensor([1.0, 0.5]), next_features=next_features)
    # Row 1: min(1, 3.5), min(2, 2.5), min(3, 1.5) -> 2.  Row 2: 1, 2, 3 -> 3.
    torch.testing.assert_close(learner.target(batch), torch.tensor([2.0, 1.5]))


def offline(config: SACConfig, width: float, count: int = 512) -> SAC:
    policy, replay = squashed(env_spec()), Replay(20_000, 0.9)
    replay.add(recorded(count, seeded(4), width))
    return config.build(policy, policy.trainable(), critics(policy), replay, seeded())


def test_the_penalty_has_the_next_states_actions_at_this_one():
    """By hand: Q(o, a) = q(o) + a, and a policy that decides 0.5 in this state and -0.25 in the next one."""
    config = CalQLConfig(num_critics=1, num_min_q=1, actions=1, conservatism=2.0)
    parameters = {"nothing": torch.nn.Parameter(torch.zeros(()))}
    learner = CalQL(Scripted(), parameters, Table(1, 1.0), Replay(8, 0.9), config, seeded(3))  # type: ignore[arg-type]
    state = {"q": torch.tensor([[1.0]]), "a": torch.tensor([[0.5]]), "logp": torch.tensor([-1.0])}
    next_state = {"q": torch.tensor([[9.0]]), "a": torch.tensor([[-0.25]]), "logp": torch.tensor([0.5])}
    uniform = 2 * float(torch.rand((1, 1), generator=seeded(3))) - 1
    found = learner.regularizer(transitions(features=state, next_features=next_state), torch.tensor([[0.7]]))
    terms = 1 + uniform + math.log(2), 1 + 0.5 + 1.0, 1 - 0.25 - 0.5
    assert float(found.detach()) == pytest.approx(2.0 * (math.log(sum(map(math.exp, terms))) - 0.7), abs=1e-5)


def test_the_penalty_of_the_regulariser_is_that_of_its_parts():
    """Against the definition, with the same random numbers drawn again, one critic and one decision at a time."""
    learner = offline(QUICK_CALQL, 1.0)
    torch.nn.init.normal_(learner.policy.head.last.weight, generator=seeded(5))  # actions depend on the state
    batch = learner.replay.sample(3, seeded(6))
    batch = replace(batch, next_features={"state": batch.features["state"] + 0.3})
    value = learner.critic(batch.features, learner.policy.critic_action(batch.features, batch.sample, batch.executed))
    learner.generator = seeded(7)
    found = float(learner.regularizer(batch, value).detach())
    generator, n = seeded(7), QUICK_CALQL.actions
    current = learner.policy.rsample(repeated(batch.features, n), generator)
    upcoming = learner.policy.rsample(repeated(batch.next_features, n), generator)
    uniform = 2 * torch.rand(current.action.shape, generator=generator) - 1
    total = 0.0
    for b in range(3):
        repeated_features = {name: item[b : b + 1].expand(n, -1) for name, item in batch.features.items()}
        copies = slice(b * n, b * n + n)
        q = [learner.critic(repeated_features, part[copies]) for part in (uniform, current.action, upcoming.action)]
        for k in range(2):
            terms = [*(q[0][k] + 2 * math.log(2))]
            for values, made in ((q[1][k], current), (q[2][k], upcoming)):
                terms += [*(values.clamp_min(float(batch.returns[b])) - made.logprob[copies])]
            total += (torch.stack(terms).exp().sum().log() - value[k, b]).item()
    assert found == pytest.approx(QUICK_CALQL.conservatism * total / 3, rel=1e-4)


@pytest.mark.full
def test_untried_actions_are_not_valued_above_recorded_ones():
    """Recorded within 0.15 of 0, where the reward still rises towards its optimum outside."""
    sac = offline(SACConfig(**{field.name: getattr(QUICK_CALQL, field.name) for field in fields(SACConfig)}), 0.15)
    careful = offline(replace(QUICK_CALQL, conservatism=5.0), 0.15)
    strayed = []
    for learner in (sac, careful):
        learner.pretrain(250)
        made = learner.policy.rsample({"state": torch.linspace(-1, 1, 128)[:, None]}, seeded(8)).action
        strayed.append(float(made.abs().mean()))
    assert strayed[1] < 0.6 * strayed[0]
    batch = careful.replay.sample(256, seeded(9))
    data = careful.critic(batch.features, batch.executed[:, 0]).mean()
    far = careful.critic(batch.features, torch.full((256, 2), 0.9)).mean()
    assert float(far) < float(data)
    # Calibrated: what is thought of the policy's own actions is not pushed below what was earned.
    state = batch.features["state"]
    earned = float(bandit_reward(state, batch.executed[:, 0]).mean())
    assert (
        float(careful.critic(batch.features, careful.policy.rsample(batch.features, seeded()).action).mean())
        > earned - 0.3
    )


@pytest.mark.full
def test_it_reaches_the_optimum_when_everything_was_recorded():
    learner = offline(replace(QUICK_CALQL, conservatism=0.1), 1.0)
    assert deployed(learner.policy) < -0.2
    learner.pretrain(400)
    assert deployed(learner.policy) > -0.04


RATES = {"lr": 3e-3, "critic_lr": 3e-3, "tau": 0.02}
CAL_QL = CalQLConfig(batch=64, num_critics=2, actions=4, temperature=0.1, temperature_lr=1e-2, **RATES)
IQL_FIRST = IQLConfig(batch=64, **RATES)
QUICK_WSRL = WSRLConfig(
    batch=64,
    num_critics=2,
    learning_starts=64,
    utd_ratio=1.0,
    policy_delay=1,
    temperature=0.7,
    temperature_lr=1e-2,
    offline=CAL_QL,
    **RATES,
)


def mixture(width: float = 1.0) -> Mixture:
    parts = {"online": Replay(5000, 0.9), "demonstrations": Replay(5000, 0.9)}
    parts["demonstrations"].add(recorded(256, seeded(4), width))
    return Mixture(parts, {"online": 0.5, "demonstrations": 0.5})


def learner_wsrl(config: WSRLConfig = QUICK_WSRL, width: float = 1.0) -> WSRL:
    policy = squashed(env_spec())
    return config.build(policy, policy.trainable(), critics(policy), mixture(width), seeded())


def weights(wsrl: WSRL) -> list[torch.Tensor]:
    parts = [*wsrl.learnt.values(), *wsrl.critic.state_dict().values(), *wsrl.target_critic.state_dict().values()]
    return [item.detach().clone() for item in [*parts, wsrl.log_temperature]]


def test_after_pre_training_only_the_recorded_data_are_gone():
    wsrl = learner_wsrl()
    before, counted = weights(wsrl), []
    wsrl.pretrain(20, lambda step, info: counted.append(step))
    assert counted == list(range(20)) and wsrl.steps == 20
    assert set(wsrl.replay.parts) == {"online"} and not len(wsrl.replay)
    assert all(not torch.equal(*pair) for pair in zip(before, weights(wsrl), strict=True) if pair[0].numel() > 1)
    assert 0.05 < float(wsrl.temperature) < 0.12  # Cal-QL's, which began at 0.1, and not SAC's 0.7
    # The targets followed slowly: they are neither the critics nor what they were.
    slow, fast = wsrl.target_critic.last.weight, wsrl.critic.last.weight
    assert not torch.equal(slow, fast)


def test_the_targets_are_those_of_pre_training():
    wsrl, made = learner_wsrl(), []
    build = CAL_QL.build

    class Spied(CalQLConfig):
        def build(self, *given: object) -> object:
            made.append(build(*given))  # type: ignore[arg-type]
            return made[-1]

    wsrl.config = replace(QUICK_WSRL, offline=Spied())
    wsrl.pretrain(5)
    for ours, theirs in zip(wsrl.target_critic.parameters(), made[0].target_critic.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours is not theirs
    assert wsrl.critic is made[0].critic and float(wsrl.temperature) == float(made[0].temperature)


def test_the_frozen_policy_collects_before_online_learning():
    wsrl, generator = learner_wsrl(), seeded(1)
    wsrl.pretrain(5)
    before = weights(wsrl)
    for _ in range(3):
        wsrl.update(bandit(wsrl.policy, 21, generator))
    assert wsrl.decisions == len(wsrl.replay) == 63 and wsrl.steps == 5
    assert same(before, weights(wsrl))
    wsrl.update(bandit(wsrl.policy, 21, generator))
    assert wsrl.steps == 5 + 21  # a step for each of the 21 decisions that end the warm-up, none for those in it
    assert not torch.equal(before[0], weights(wsrl)[0])


@pytest.mark.parametrize(
    "offline", [pytest.param(one, marks=pytest.mark.full) for one in (CAL_QL, IQL_FIRST)], ids=["Cal-QL", "IQL"]
)
def test_it_finds_the_optimum_that_was_not_recorded(offline):
    """Recorded within 0.25 of 0: pre-training gets as far as that, online learning to the optimum."""
    wsrl, generator = learner_wsrl(replace(QUICK_WSRL, offline=offline), width=0.25), seeded(1)
    wsrl.pretrain(150)
    pretrained = deployed(wsrl.policy)
    assert pretrained < -0.03
    for _ in range(12):
        wsrl.update(bandit(wsrl.policy, 64, generator))
    assert deployed(wsrl.policy) > -0.02


def test_a_resumed_wsrl_goes_on_without_the_recorded_data():
    ours, generator = learner_wsrl(), seeded(1)
    ours.pretrain(5)
    ours.update(bandit(ours.policy, 70, generator))
    theirs = learner_wsrl()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # as if it came from the disk
    assert set(theirs.replay.parts) == {"online"}
    for one in (ours, theirs):
        one.update(recorded(8, seeded(5)))
    assert same(weights(ours), weights(theirs))


def test_keep_only_refuses_an_unknown_part():
    replay = mixture()
    with pytest.raises(UserError, match=r"no replay buffer 'offline' among .'demonstrations', 'online'."):
        replay.keep_only("offline")
    replay.keep_only("demonstrations")
    assert replay.counts(10) == {"demonstrations": 10}
