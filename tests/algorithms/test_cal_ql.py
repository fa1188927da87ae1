"""Cal-QL: golden penalties, the integral they estimate, targets by hand, and what it makes of recorded data."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.off_policy_toys import Scripted, Table, critics, deployed, env_spec, recorded, seeded, squashed, transitions
from tests.toys import bandit_reward
from vla_rl.algorithms.sac import SAC, SACConfig
from vla_rl.algorithms.wsrl import CalQL, CalQLConfig, conservative_penalty, repeated
from vla_rl.contract.policy import CriticAction
from vla_rl.experience.replay import Replay

QUICK = CalQLConfig(
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


def test_the_bound_is_for_the_policys_actions_and_before_the_weight():
    everything = [0 + math.log(2), 1 + math.log(2), 2 + 0.5, 1 + 1.0, 1.5 + 0.2, 1 + 0.7]
    expected = math.log(sum(map(math.exp, everything))) - 1.2
    found = conservative_penalty(UNIFORM, CHOSEN, LOGPROB, RECORDED, torch.tensor([1.0]), 1)
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_critics_decisions_and_bounds_do_not_mix():
    draw = lambda *shape: torch.randn(*shape, generator=seeded(1))  # noqa: E731
    uniform, chosen, logprob, value, bound = draw(3, 5, 4), draw(3, 5, 8), draw(5, 8), draw(3, 5), draw(5)
    found = conservative_penalty(uniform, chosen, logprob, value, bound, 2)
    for k in range(3):
        for b in range(5):
            alone = [item[k : k + 1, b : b + 1] for item in (uniform, chosen)]
            one = conservative_penalty(*alone, logprob[b : b + 1], value[k : k + 1, b : b + 1], bound[b : b + 1], 2)
            torch.testing.assert_close(found[k, b], one[0, 0])


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


def test_the_target_is_the_best_of_several_actions_by_their_minimum_over_critics_without_entropy():
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


def test_the_penalty_has_the_actions_of_the_next_state_at_the_values_of_this_one():
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
    learner = offline(QUICK, 1.0)
    torch.nn.init.normal_(learner.policy.head.last.weight, generator=seeded(5))  # actions depend on the state
    batch = learner.replay.sample(3, seeded(6))
    batch = replace(batch, next_features={"state": batch.features["state"] + 0.3})
    value = learner.critic(batch.features, learner.policy.critic_action(batch.features, batch.sample, batch.executed))
    learner.generator = seeded(7)
    found = float(learner.regularizer(batch, value).detach())
    generator, n = seeded(7), QUICK.actions
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
    assert found == pytest.approx(QUICK.conservatism * total / 3, rel=1e-4)


@pytest.mark.full
def test_untried_actions_are_not_valued_above_recorded_ones():
    """Recorded within 0.15 of 0, where the reward still rises towards its optimum outside."""
    sac = offline(SACConfig(**{n: getattr(QUICK, n) for n in SACConfig.__dataclass_fields__}), 0.15)
    careful = offline(replace(QUICK, conservatism=5.0), 0.15)
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
    learner = offline(replace(QUICK, conservatism=0.1), 1.0)
    assert deployed(learner.policy) < -0.2
    learner.pretrain(400)
    assert deployed(learner.policy) > -0.04
